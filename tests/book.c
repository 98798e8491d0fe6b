// The numbers of the book (make book): what a text becomes on its way through a model, as JSON.
//   tests/book [MODEL.bin]
// Of a model with delta layers it prints only what their S keeps of each token (put_memory).
// What it prints stands in State between the steps of walk.h. The x that these leave must be
// forward's, bit for bit: else it dies, because the page would show another model.
#include "walk.h"

// MOST: tokens of a text and its answer. FREE: the position where the next token is most open, "The
// capital of" (for the sampler). CORNER: elements that the delta rule's example shows.
enum { MOST = 64, FREE = 2, CORNER = 4 };
typedef enum { GUESSES, VECTORS, ALL } Detail;  // of a token

// JSON: each put_ writes a value with its name, or in a list (name NULL) without.
static bool first = true;  // no comma before the next value
static void name_of(const char *name) {
    if (!first) printf(",%s", name ? "\n" : "");
    if (name) printf("\"%s\":", name);
    first = false;
}
static void begin(const char *name, char bracket) { name_of(name), putchar(bracket), first = true; }
static void end(char bracket) { putchar(bracket), first = false; }
static void put(const char *name, double x) { name_of(name), printf("%.6g", x); }
static void put_text(const char *name, Bytes text) { name_of(name), fputs(json(text), stdout); }
#define PUT_EACH(name, n, value) do { /* a value of i */ \
    begin(name, '['); \
    for (int i = 0; i < (int)(n); i++) put(NULL, value); \
    end(']'); \
} while (0)
#define PUT_ALL(name, x, n) PUT_EACH(name, n, (x)[i])

static void put_next(const char *name) {
    int id[LIKELIEST];
    float p[LIKELIEST];
    find_guesses(LIKELIEST, id, p);
    begin(name, '[');
    for (int at = 0; at < LIKELIEST; at++) PUT_ALL(NULL, ((float[]){id[at], p[at]}), 2);
    end(']');
}

// The shares of each head. The a that attend_simply makes of them must be attend's.
static void put_shares(int l, int pos) {
    float share[MOST], a[c->head_dim];
    begin("share", '[');
    for (int head = 0; head < c->n_heads; head++) {
        attend_simply(l, head, pos, share, a);
        PUT_ALL(NULL, share, pos + 1);
        for (int j = 0; j < c->head_dim; j++)
            if (fabsf(a[j] - m->state.a[head * c->head_dim + j]) > 1e-4f) die("book: a differs");
    }
    end(']');
}

static void put_layer(int l, int pos, Detail detail) {
    const State *s = &m->state;
    const Layer *layer = &m->weights.layers[l];
    begin(NULL, '{');
    add_attention(l, pos);
    if (detail >= VECTORS) {
        PUT_ALL("q", s->q, c->q_dim);
        PUT_ALL("k", in_cache(m, s->keys, l, pos, 0), c->kv_dim);
        PUT_ALL("v", in_cache(m, s->values, l, pos, 0), c->kv_dim);
        put_shares(l, pos);
        PUT_ALL("a", s->a, c->q_dim);
        PUT_ALL("x_between", s->x, c->dim);
    }
    if (detail == ALL) {
        PUT_ALL("h", s->h, c->dim);
        PUT_ALL("int8", s->h8.int8, c->dim);
        PUT_ALL("scale", s->h8.scale, c->dim / c->group_size);
        put("q_first", dot_row(&layer->wq, 0, s->h8));
        PUT_ALL("wo_a", s->out, c->dim);
    }
    put_next("next_between");

    add_feed_forward(l);
    if (detail >= VECTORS) PUT_ALL("x", s->x, c->dim);
    if (detail == ALL) {
        PUT_EACH("w1_h", c->hidden_dim, dot_row(&layer->w1, i, s->h8));
        PUT_ALL("w3_h", s->up, c->hidden_dim);
        PUT_ALL("product", s->gate, c->hidden_dim);
        PUT_ALL("ffn", s->out, c->dim);
    }
    put_next("next");
    end('}');
}

// The tokens whose rows of the embedding table have the smallest angles with x, and their cosines
static void put_nearest(const float *x) {
    float cosine[c->vocab_size], y[c->dim];
    for (int id = 0; id < c->vocab_size; id++) {
        embed(m, id, y);
        cosine[id] = dot_of(x, y, c->dim) /
                     sqrtf(dot_of(x, x, c->dim) * dot_of(y, y, c->dim) + FLT_MIN);
    }
    begin("nearest", '[');
    for (int at = 0; at <= LIKELIEST; at++) {
        const int best = argmax(cosine, c->vocab_size);
        if (at > 0) PUT_ALL(NULL, ((float[]){best, cosine[best]}), 2);  // 0: itself
        cosine[best] = -1;
    }
    end(']');
}

// What one token computes. Then forward runs it once more, and must leave the same x.
static void put_token(int id, int pos, Detail detail) {
    float x[c->dim];
    begin_token(id, pos);
    begin(NULL, '{');
    if (detail >= VECTORS) PUT_ALL("embed", m->state.x, c->dim);
    if (detail >= VECTORS) put_nearest(m->state.x);
    put_next("next");
    begin("layers", '[');
    for (int l = 0; l < c->n_layers; l++) put_layer(l, pos, detail);
    end(']');
    memcpy(x, m->state.x, sizeof(x));
    forward(m, id, pos);
    if (memcmp(x, m->state.x, sizeof(x))) die("book: x of token %d differs from forward's", pos);
    const float *logits = compute_logits(m);
    if (detail == ALL || (detail == VECTORS && pos == FREE)) PUT_ALL("logits", logits, c->vocab_size);
    end('}');
}

// A text's tokens and those of its answer, the likeliest each time, up to a stop token. Details are
// those of the last token of the prompt; of the others at most VECTORS.
static void put_run(const char *name, const char *text, bool question, Detail detail) {
    Ids ids = encode(bytes(text), question);
    const int n = (int)ids.n;
    begin(name, '{');
    put_text("text", bytes(text));
    put("n_prompt", n);
    begin("tokens", '[');
    for (int pos = 0; pos < (int)ids.n; pos++) {
        put_token(ids.p[pos], pos, pos == n - 1 ? detail : detail == ALL ? VECTORS : detail);
        if (pos < n - 1) continue;
        const int id = argmax(compute_logits(m), c->vocab_size);
        if (ids.n == MOST || is_stop(tok, id)) break;
        ids_add(&ids, id);
    }
    end(']');
    PUT_ALL("ids", ids.p, ids.n);
    PUT_EACH("added", ids.n, tok->kind[ids.p[i]] & ADDED);
    end('}');
}

// What is likeliest after a text if halves of layers are left out for its last token: in number
// `off` of the list, bit l is the attention of layer l, bit n_layers + l its feed-forward.
static void put_off(const char *text) {
    const Ids ids = encode(bytes(text), false);
    const int last = (int)ids.n - 1;
    for (int pos = 0; pos < last; pos++) forward(m, ids.p[pos], pos);
    begin("off", '[');
    for (int off = 0; off < 1 << 2 * c->n_layers; off++) {
        begin_token(ids.p[last], last);
        for (int l = 0; l < c->n_layers; l++) {
            if (!(off >> l & 1)) add_attention(l, last);
            if (!(off >> (c->n_layers + l) & 1)) add_feed_forward(l);
        }
        put_next(NULL);
    }
    end(']');
}

// The delta rule with small numbers: keys and values of CORNER elements, all others 0
static void put_delta(void) {
    static const struct { float g, b, k[CORNER], v[CORNER]; } step[] = {
        {1, 1, {1, 0}, {2, 3}}, {1, 1, {0, 1}, {-1, 4}}, {1, 1, {1, 0}, {5, 0}},
        {1, 0.5, {0, 1}, {3, 0}}, {0.5, 1, {0, 0, 1}, {0, 0, 6}}, {1, 1, {0.6f, 0.8f}, {0, 0, 0, 5}}};
    static float S[DELTA_DIM * DELTA_DIM], k[DELTA_DIM], v[DELTA_DIM], a[DELTA_DIM];
    begin("delta", '[');
    for (int token = 0; token < 6; token++) {
        memcpy(k, step[token].k, sizeof(step->k));
        memcpy(v, step[token].v, sizeof(step->v));
        learn(S, k, k, v, step[token].g, step[token].b, a, DELTA_DIM);  // asks with the key just learned
        begin(NULL, '{');
        put("g", step[token].g), put("b", step[token].b);
        PUT_ALL("k", k, CORNER);
        PUT_ALL("v", v, CORNER);
        begin("S", '[');
        for (int row = 0; row < CORNER; row++) PUT_ALL(NULL, S + row * DELTA_DIM, CORNER);
        end(']');
        PUT_ALL("a", a, CORNER);
        end('}');
    }
    end(']');
}

// The token's g and b in a head. And of the value v of each token so far, by its key k, the part
// that S has now: (S^T k . v) / (v . v). State has the token's own q, k and v in q.
static void put_memory_head(int l, int head, int pos, float (*k)[DELTA_DIM], float (*v)[DELTA_DIM]) {
    const Layer *layer = &m->weights.layers[l];
    const float *S = m->state.delta + layer->number * layer_state(c) + head * DELTA_DIM * DELTA_DIM;
    const float *keys = m->state.q + c->delta_k_dim, *values = keys + c->delta_k_dim;
    const int k_head = head / (c->delta_v_heads / c->delta_k_heads);
    float g, b, part[MOST] = {0};
    memcpy(k[pos], keys + k_head * DELTA_DIM, sizeof(*k));
    memcpy(v[pos], values + head * DELTA_DIM, sizeof(*v));
    rates_of(layer, m->state.h, c->dim, head, &g, &b);
    for (int i = 0; i <= pos; i++) {
        for (int row = 0; row < DELTA_DIM; row++)
            part[i] += k[i][row] * dot_of(S + row * DELTA_DIM, v[i], DELTA_DIM);
        part[i] /= dot_of(v[i], v[i], DELTA_DIM);
    }
    begin(NULL, '{');
    put("layer", l), put("head", head), put("g", g), put("b", b);
    PUT_ALL("kept", part, pos + 1);
    end('}');
}

// For each token a list of all heads of the delta layers. And what the model says after the last.
static void put_memory(const char *text) {
    static float k[16][MOST][DELTA_DIM], v[16][MOST][DELTA_DIM];
    const Ids ids = encode(bytes(text), false);
    begin("memory", '[');
    for (int pos = 0; pos < (int)ids.n; pos++) {
        int at = 0;
        begin(NULL, '[');
        begin_token(ids.p[pos], pos);
        for (int l = 0; l < c->n_layers; l++) {
            const int heads = m->weights.layers[l].conv ? c->delta_v_heads : 0;
            add_attention(l, pos);
            for (int head = 0; head < heads; head++, at++) put_memory_head(l, head, pos, k[at], v[at]);
            add_feed_forward(l);
        }
        end(']');
    }
    end(']');
    put_next("memory_next");
}

// The pieces of a text, and their tokens
static void put_pieces(Bytes text) {
    begin("pieces", '[');
    while (text.n) {
        const Bytes piece = {text.p, piece_length(tok, text)};
        Ids ids = {0};
        encode_piece(tok, piece, &ids);
        begin(NULL, '{');
        put_text("text", piece);
        PUT_ALL("ids", ids.p, ids.n);
        end('}');
        text = bytes_from(text, piece.n);
    }
    end(']');
}

static void put_model(void) {
    const Layer *layer = m->weights.layers;
#define PUT(field) put(#field, c->field)
    PUT(dim), PUT(hidden_dim), PUT(n_layers), PUT(n_heads), PUT(n_kv_heads), PUT(vocab_size);
    PUT(head_dim), PUT(group_size), PUT(rope_theta), PUT(rms_norm_eps), PUT(rotary_dim);
    begin("vocabulary", '[');
    for (int i = 0; i < c->vocab_size; i++) put_text(NULL, tok->text[i]);
    end(']');
    PUT_EACH("priority", c->vocab_size, tok->kind[i] & ADDED ? 1 : tok->priority[i]);  // 1: no merge
    PUT_ALL("stop", tok->stop.p, tok->stop.n);
    PUT_ALL("rms_att", layer->rms_att, c->dim);
    PUT_EACH("row", c->dim, weight_int(&layer->wq, 0, i));  // row 0 of Wq
    PUT_EACH("row_scale", c->dim / c->group_size, weight_scale(&layer->wq, 0, i));
}

int main(int argc, char **argv) {
    static const char *const others[] = {
        "The capital of Japan is", "The capital of Peru is", "The capital of Japan, France is",
        "The capital of Wales is", "3 + 4 = "};
    static const char text[] = "The capital of France is";
    start_platform(&argc, &argv);
    open_model(argc == 2 ? argv[1] : "tests/tiny/tiny.bin");
    begin(NULL, '{');
    if (c->attention_every) put_memory(text);
    else {
        put_model();
        put_pieces(bytes(text));
        put_run("run", text, false, ALL);
        begin("others", '[');
        for (int i = 0; i < 5; i++) put_run(NULL, others[i], false, GUESSES);
        end(']');
        put_run("chat", "What is the capital of France?", true, GUESSES);
        put_off(text);
        put_delta();
    }
    end('}');
}
