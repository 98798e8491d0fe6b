// One token's journey: what the last token of a text becomes on its way through the model.
//   tests/journey [MODEL.bin] TEXT     make journey TEXT="..."
// To see x after each layer, forward() runs for the model's first 0, 1, 2, ... layers, in the end
// for all of them. tests/reference.py prints the same by its equations.
#include "../qwen3.c"

enum { MOST_TOKENS = 4096, HEADS_PER_LINE = 4 };

static Engine engine;  // the program's state, as main() of qwen3.c has it
static Model *const m = &engine.model;
static Ids ids;

// A token's text as a JSON string, good until the next call
static const char *piece(int id) {
    static Buffer line;
    line.n = 0;
    buffer_add_json(&line, engine.tokenizer.text[id], true);
    buffer_add(&line, (Bytes){(uint8_t *)"", 1});
    return (char *)line.p;
}

static void print_tokens(void) {
    printf("position    id  token\n");
    for (int i = 0; i < (int)ids.n; i++) printf("%8d %5d  %s\n", i, ids.p[i], piece(ids.p[i]));
}

// The `count` most likely next tokens and their probabilities, as if no layer followed
static void print_next(const char *format, int count) {
    const int vocab_size = m->config.vocab_size;
    float *p = compute_logits(m);
    const float total = softmax_terms(p, vocab_size, max_of(p, vocab_size));
    for (int i = 0; i < count; i++) {
        const int best = argmax(p, vocab_size);
        printf(format, p[best] / total, piece(best));
        p[best] = 0;
    }
}

// For each head of layer l the last token's largest share, and the position and token that it goes to.
// After forward() State.q still holds the last token's queries and the cache the layer's keys.
static void print_attention(int l) {
    static float score[MOST_TOKENS];
    const int n = (int)ids.n, n_heads = m->config.n_heads;
    for (int head = 0; head < n_heads; head++) {
        const int kv_head = head / (n_heads / m->config.n_kv_heads);
        const float *q = m->state.q + head * m->config.head_dim;
        for (int i = 0; i < n; i++)
            score[i] = attention_score(q, in_cache(m, m->state.keys, l, i, kv_head), m->config.head_dim);
        const float total = softmax_terms(score, n, max_of(score, n));
        const int best = argmax(score, n);
        const bool ends = head == n_heads - 1 || head % HEADS_PER_LINE == HEADS_PER_LINE - 1;
        if (head && head % HEADS_PER_LINE == 0) printf("\n%25s", "");
        printf("  %.2f %d %-*s", score[best] / total, best, ends ? 0 : 10, piece(ids.p[best]));
    }
}

int main(int argc, char **argv) {
    start_platform(&argc, &argv);
    if (argc != 2 && argc != 3) die_usage("usage: tests/journey [MODEL.bin] TEXT");
    engine.options = (Options){.model = argc == 3 ? argv[1] : "tests/tiny/tiny.bin", .mode = GENERATE,
                            .context = -1, .batch = MOST_TOKENS};
    load_model(&engine);
    prepare_places(&engine);
    encode_raw(&engine.tokenizer, bytes(argv[argc - 1]), &ids);
    const int n = (int)ids.n, n_layers = m->config.n_layers;
    if (n < 1 || n > MOST_TOKENS) die("TEXT: expected 1 to %d tokens, found %d", MOST_TOKENS, n);
    print_tokens();
    printf("\nlayers |x|  next           "
           "share, position and token that each head attends to most\n");
    for (int l = 0; l <= n_layers; l++) {
        m->config.n_layers = l;
        for (int pos = 0; pos < n; pos++) forward(m, ids.p[pos], pos);
        printf("%3d %6.2f", l, sqrtf(sum_of(m->state.x, m->config.dim, true)));
        print_next(l == 0 ? "  %.2f %s" : "  %.2f %-8s", 1);
        if (l > 0) print_attention(l - 1);
        printf("\n");
    }
    printf("\nnext token\n");
    print_next("%10.4f  %s\n", 5);
}
