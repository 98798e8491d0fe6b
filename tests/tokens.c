// tests/tokens MODEL.bin < texts: a line of ids for each record, of kind marked (added tokens count,
// as in the raw modes) or plain (they do not).
#include "../qwen3.c"
#include "records.h"

int main(int argc, char **argv) {
    start_platform(&argc, &argv);
    if (argc != 2) die_usage("usage: tests/tokens MODEL.bin < texts");
    static Engine e;
    e.options = (Options){.model = argv[1], .mode = TOKENIZE, .context = -1};
    load(&e);
    Buffer text = {0};
    Ids ids = {0};
    Encoder encoder = {.t = &e.tokenizer, .out = &ids};
    char kind[16];
    while (next_record(kind, &text)) {
        Bytes s = {text.p, text.n};
        ids.n = 0;
        if (!strcmp(kind, "marked")) encode_marked(&encoder, s);
        else encode_plain(&encoder, s);
        encode_end(&encoder);
        text.n = 0;
        buffer_add_ids(&text, &ids);
        write_stdout((Bytes){text.p, text.n});
    }
}
