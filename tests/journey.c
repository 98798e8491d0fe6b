// One token's journey: what the last token of a text becomes on its way through a model.
//   tests/journey [MODEL.bin] TEXT      make journey MODEL=FILE TEXT="..."
//   tests/journey MODEL.bin -i TEXT     make journey MODEL=FILE QUESTION="...": a chat's question
// tests/reference.py prints the same by its equations.
#include "walk.h"

enum { HEADS_PER_LINE = 4 };

static Ids ids;

// The `count` most likely next tokens and their probabilities, as if no layer followed
static void print_next(const char *format, int count) {
    int id[LIKELIEST];
    float p[LIKELIEST];
    find_guesses(count, id, p);
    for (int i = 0; i < count; i++) printf(format, p[i], json(tok->text[id[i]]));
}

// For each head of layer l the last token's largest share, and the position and token that it goes
// to; in a delta layer, by its h, how much each head keeps of its memory, and learns of the new.
static void print_heads(int l, const float *h) {
    const Layer *layer = &m->weights.layers[l];
    const int n = (int)ids.n, heads = layer->conv ? c->delta_v_heads : c->n_heads;
    static float share[MOST_TOKENS], a[MOST_TOKENS];
    for (int head = 0; head < heads; head++) {
        const bool ends = head == heads - 1 || head % HEADS_PER_LINE == HEADS_PER_LINE - 1;
        if (head && head % HEADS_PER_LINE == 0) printf("\n%25s", "");
        if (layer->conv) {
            float keeps, learns;
            rates_of(layer, h, c->dim, head, &keeps, &learns);
            printf("  keeps %.2f, learns %.2f", keeps, learns);
        } else {
            attend_simply(l, head, n - 1, share, a);
            const int best = argmax(share, n);
            printf("  %.2f %d %-*s", share[best], best, ends ? 0 : 10, json(tok->text[ids.p[best]]));
        }
    }
}

int main(int argc, char **argv) {
    start_platform(&argc, &argv);
    const bool question = argc == 4 && strcmp(argv[2], "-i") == 0;
    if (argc != 2 && argc != 3 && !question)
        die_usage("usage: tests/journey [MODEL.bin] TEXT, or MODEL.bin -i TEXT");
    open_model(argc == 2 ? "tests/tiny/tiny.bin" : argv[1]);
    ids = encode(bytes(argv[argc - 1]), question);
    const int n = (int)ids.n;
    if (n < 1 || n > MOST_TOKENS) die("TEXT: expected 1 to %d tokens, found %d", MOST_TOKENS, n);
    printf("position    id  token\n");
    for (int i = 0; i < n; i++) printf("%8d %5d  %s\n", i, ids.p[i], json(tok->text[ids.p[i]]));
    printf("\nlayers |x|  next           "
           "share, position and token that each head attends to most\n");
    for (int pos = 0; pos < n - 1; pos++) forward(m, ids.p[pos], pos);
    begin_token(ids.p[n - 1], n - 1);
    float h[c->dim];
    for (int l = 0; l <= c->n_layers; l++) {
        if (l > 0) {
            add_attention(l - 1, n - 1);
            memcpy(h, m->state.h, sizeof(h));
            add_feed_forward(l - 1);
        }
        printf("%3d %6.2f", l, sqrtf(sum_of(m->state.x, c->dim, true)));
        print_next(l == 0 ? "  %.2f %s" : "  %.2f %-8s", 1);
        if (l > 0) print_heads(l - 1, h);
        printf("\n");
    }
    printf("\nnext token\n");
    print_next("%10.4f  %s\n", LIKELIEST);
}
