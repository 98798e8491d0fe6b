// tests/render MODEL.bin 0|1 < conversation: the ids of a conversation's prompt, thinking off or on.
// The conversation is records of kind system, user or assistant; an assistant's text counts with its
// added tokens.
#include "../qwen3.c"
#include "records.h"

int main(int argc, char **argv) {
    start_platform(&argc, &argv);
    if (argc != 3 || (strcmp(argv[2], "0") && strcmp(argv[2], "1")))
        die_usage("usage: tests/render MODEL.bin 0|1 < conversation");
    static Engine e;
    e.options = (Options){.model = argv[1], .mode = TOKENIZE, .context = -1, .think = atoi(argv[2])};
    quiet = true;
    load(&e);
    choose_chat(&e);
    Conversation c = {0};
    Buffer text = {0};
    Ids ids = {0};
    Encoder encoder = {.t = &e.tokenizer, .out = &ids};
    char kind[16];
    while (next_record(kind, &text)) {
        Bytes s = {text.p, text.n};
        if (!strcmp(kind, "assistant")) {
            Message *m = conversation_add(&c, ASSISTANT, (Bytes){0});
            encode_marked(&encoder, s);
            encode_end(&encoder);
            for (size_t i = 0; i < ids.n; i++) ids_add(&m->ids, ids.p[i]);
            ids.n = 0;
        } else {
            bool user = !strcmp(kind, "user");
            if (!user && strcmp(kind, "system")) die("stdin: unknown kind \"%s\"", kind);
            conversation_add(&c, user ? USER : SYSTEM, s);
        }
    }
    render(&e.tokenizer, &c, e.think, &ids);
    text.n = 0;
    buffer_add_ids(&text, &ids);
    write_stdout((Bytes){text.p, text.n});
}
