// The numbers of the book (make book): what one text becomes on its way through the model, as JSON.
//   tests/book [MODEL.bin]
// Of a model with delta layers it prints only what their S keeps of each token (put_memory).
// It calls the functions of run_layer one by one and prints what lies between them. The x that they
// leave must be forward's, bit for bit: else it dies, because the page would show another model.
#include "../qwen3.c"

// FREE: the position where the next token is most open, "The capital of" (for the sampler)
enum { MOST = 64, LIKELIEST = 5, DRAWS = 1000, CORNER = 4, FREE = 2 };

static Engine engine;  // the program's state, as main() of qwen3.c has it
static Model *const m = &engine.model;
static const Tokenizer *const tok = &engine.tokenizer;
static Ids ids;

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
static void put_text(const char *name, Bytes text) {
    static Buffer line;
    line.n = 0;
    buffer_add_json(&line, text, true);
    name_of(name), printf("%.*s", (int)line.n, (char *)line.p);
}
#define PUT_ALL(name, x, n) do { \
    begin(name, '['); \
    for (int each = 0; each < (int)(n); each++) put(NULL, (x)[each]); \
    end(']'); \
} while (0)
static void put_q8(const char *name, Q8 x, int n) {
    begin(name, '{');
    PUT_ALL("int8", x.int8, n);
    PUT_ALL("scale", x.scale, n / m->config.group_size);
    end('}');
}

// One piece's merges: the tokens before each, the number of the pair, the merge's priority. The
// loop is encode_piece's; what it ends with must be what encode_piece gives.
static void put_merges(Bytes piece) {
    Ids now = {0}, right = {0};
    encode_piece(tok, piece, &right);
    for (size_t i = 0; i < piece.n; i++)
        ids_add(&now, token_find(tok, (Bytes){piece.p + i, 1}, false));
    begin(NULL, '{');
    put_text("text", piece);
    begin("steps", '[');
    for (int best = 0; best >= 0;) {
        int merged = -1;
        Bytes both = piece;
        best = -1;
        for (size_t i = 0; i + 1 < now.n; i++) {
            both.n = tok->text[now.p[i]].n + tok->text[now.p[i + 1]].n;
            const int id = token_find(tok, both, false);
            both.p += tok->text[now.p[i]].n;
            if (id < 0 || (best >= 0 && tok->priority[id] <= tok->priority[merged])) continue;
            best = (int)i, merged = id;
        }
        begin(NULL, '{');
        PUT_ALL("ids", now.p, (int)now.n);
        put("pair", best);
        if (best >= 0) put("priority", tok->priority[merged]);
        end('}');
        if (best < 0) break;
        now.p[best] = merged;
        memmove(now.p + best + 1, now.p + best + 2, (--now.n - best - 1) * sizeof(int));
    }
    end(']');
    end('}');
    if (now.n != right.n || memcmp(now.p, right.p, now.n * sizeof(int))) die("book: merges differ");
}

// The likeliest next tokens as if no further layer followed: the "logit lens"
static void put_next(const char *name) {
    float *p = compute_logits(m);
    const int n = m->config.vocab_size;
    const float total = softmax_terms(p, n, max_of(p, n));
    begin(name, '[');
    for (int i = 0; i < LIKELIEST; i++) {
        const int best = argmax(p, n);
        PUT_ALL(NULL, ((float[]){best, p[best] / total}), 2);
        p[best] = 0;
    }
    end(']');
}

// Layer l of the token at pos, by the functions that run_layer calls, in its order. Without `all`
// only what later tokens or pictures of all tokens need.
static void put_layer(int l, int pos, bool all) {
    const Config *c = &m->config;
    const Layer *layer = &m->weights.layers[l];
    State *s = &m->state;
    const bool qk_norm = layer->q_norm;
    float *q = malloc(c->q_dim * sizeof(float)), *k = malloc(c->kv_dim * sizeof(float));
    float score[MOST];

    begin(NULL, '{');
    norm_and_quantize(m, layer->rms_att);
    if (all) PUT_ALL("h", s->h, c->dim);
    if (all) put_q8("h8", s->h8, c->dim);
    matmul(q, &layer->wq, 0, c->q_dim, s->h8);
    matmul(k, &layer->wk, 0, c->kv_dim, s->h8);
    if (all) PUT_ALL("q_raw", q, c->q_dim);
    for (int i = 0; qk_norm && i < c->q_dim; i += c->head_dim)
        rmsnorm(q + i, q + i, layer->q_norm, c->head_dim, c->rms_norm_eps);
    for (int i = 0; qk_norm && i < c->kv_dim; i += c->head_dim)
        rmsnorm(k + i, k + i, layer->k_norm, c->head_dim, c->rms_norm_eps);
    if (all) PUT_ALL("q_norm", q, c->q_dim);
    PUT_ALL("k_norm", k, c->kv_dim);

    run_attention(m, l, pos);
    PUT_ALL("q", s->q, c->q_dim);
    PUT_ALL("k", in_cache(m, s->keys, l, pos, 0), c->kv_dim);
    PUT_ALL("v", in_cache(m, s->values, l, pos, 0), c->kv_dim);
    begin("heads", '[');
    for (int head = 0; head < c->n_heads; head++) {
        const int kv_head = head / (c->n_heads / c->n_kv_heads);
        for (int i = 0; i <= pos; i++)
            score[i] = attention_score(s->q + head * c->head_dim,
                                       in_cache(m, s->keys, l, i, kv_head), c->head_dim);
        begin(NULL, '{');
        PUT_ALL("score", score, pos + 1);
        const float total = softmax_terms(score, pos + 1, max_of(score, pos + 1));
        for (int i = 0; i <= pos; i++) score[i] /= total;
        PUT_ALL("share", score, pos + 1);
        end('}');
    }
    end(']');
    PUT_ALL("a", s->a, c->q_dim);
    quantize(s->a8, s->a, layer->wo.cols, c->group_size);
    matmul(s->out, &layer->wo, 0, c->dim, s->a8);
    if (all) PUT_ALL("wo_a", s->out, c->dim);
    add(s->x, s->out, c->dim);
    PUT_ALL("x_between", s->x, c->dim);
    put_next("next_between");

    norm_and_quantize(m, layer->rms_ffn);
    if (all) PUT_ALL("h_ffn", s->h, c->dim);
    matmul(s->gate, &layer->w1, 0, c->hidden_dim, s->h8);
    if (all) PUT_ALL("w1_h", s->gate, c->hidden_dim);
    feed_forward(m, layer, 0, s->out);
    if (all) PUT_ALL("w3_h", s->up, c->hidden_dim);
    if (all) PUT_ALL("product", s->gate, c->hidden_dim);
    if (all) PUT_ALL("ffn", s->out, c->dim);
    add(s->x, s->out, c->dim);
    PUT_ALL("x", s->x, c->dim);
    put_next("next");
    end('}');
    free(q);
    free(k);
}

// The tokens whose rows of the embedding table have the smallest angles with x, and their cosines
static void put_nearest(const float *x) {
    const int dim = m->config.dim, n = m->config.vocab_size;
    float *cosine = malloc(n * sizeof(float)), *y = malloc(dim * sizeof(float));
    for (int id = 0; id < n; id++) {
        embed(m, id, y);
        cosine[id] = dot_of(x, y, dim) / sqrtf(dot_of(x, x, dim) * dot_of(y, y, dim) + FLT_MIN);
    }
    begin("nearest", '[');
    for (int i = 0; i <= LIKELIEST; i++) {
        const int best = argmax(cosine, n);
        if (i > 0) PUT_ALL(NULL, ((float[]){best, cosine[best]}), 2);  // 0: itself
        cosine[best] = -1;
    }
    end(']');
    free(cosine);
    free(y);
}

// All that one token computes. Then forward runs it once more, and must leave the same x.
static void put_token(int pos, bool all) {
    const Config *c = &m->config;
    const size_t size = c->dim * sizeof(float);
    float *x = malloc(size);
    begin(NULL, '{');
    embed(m, ids.p[pos], m->state.x);
    rope_angles(c, pos, m->state.cos, m->state.sin);
    PUT_ALL("embed", m->state.x, c->dim);
    put_nearest(m->state.x);
    put_next("next");
    begin("layers", '[');
    for (int l = 0; l < c->n_layers; l++) put_layer(l, pos, all);
    end(']');
    memcpy(x, m->state.x, size);
    forward(m, ids.p[pos], pos);
    if (memcmp(x, m->state.x, size)) die("book: x of token %d differs from forward's", pos);
    free(x);
    if (all || pos == FREE) {
        const float *logits = compute_logits(m);
        PUT_ALL("logits", logits, c->vocab_size);
    }
    end('}');
}

// How often each token is drawn, with seeds 1 to DRAWS, by the logits of the token at pos
static void put_draws(int pos) {
    const int n = m->config.vocab_size;
    int *count = calloc(n, sizeof(int));
    Sampler sampler = {.temperature = 0.6f, .top_k = 20, .top_p = 0.95f, .repetition = 1};
    for (int i = 0; i <= pos; i++) forward(m, ids.p[i], i);
    for (int seed = 1; seed <= DRAWS; seed++) {
        sampler.rng = seed;
        count[sample(&sampler, compute_logits(m), n)]++;
    }
    begin("draws", '{');
    put("temperature", 0.6), put("top_k", sampler.top_k), put("top_p", 0.95), put("pos", pos);
    PUT_ALL("count", count, n);
    end('}');
    free(count);
}

// The prompt of a chat, and which of its ids the chat format wrote
static void put_chat(const char *text) {
    Conversation talk = {0};
    Ids prompt = {0};
    conversation_add(&talk, USER, bytes(text));
    render(tok, &talk, 0, false, &prompt);
    PUT_ALL("chat", prompt.p, (int)prompt.n);
    begin("chat_kind", '[');
    for (size_t i = 0; i < prompt.n; i++) put(NULL, tok->kind[prompt.p[i]]);
    end(']');
}

// The delta rule with small numbers: keys and values of CORNER elements, all others 0
static void put_delta(void) {
    static const struct { float g, b, k[CORNER], v[CORNER]; } step[] = {
        {1, 1, {1, 0}, {2, 3}}, {1, 1, {0, 1}, {-1, 4}}, {1, 1, {1, 0}, {5, 0}},
        {1, 0.5, {0, 1}, {3, 0}}, {0.5, 1, {0, 0, 1}, {0, 0, 6}}, {1, 1, {0.6f, 0.8f}, {0, 0, 0, 5}}};
    static float S[DELTA_DIM * DELTA_DIM], k[DELTA_DIM], v[DELTA_DIM], a[DELTA_DIM];
    begin("delta", '[');
    for (int i = 0; i < 6; i++) {
        memcpy(k, step[i].k, sizeof(step[i].k));
        memcpy(v, step[i].v, sizeof(step[i].v));
        learn(S, k, k, v, step[i].g, step[i].b, a);  // it asks with the key that it has learnt
        begin(NULL, '{');
        put("g", step[i].g), put("b", step[i].b);
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

// What S of each head of each delta layer still has, after each token, for the keys of the tokens so
// far: of each one's value v the part (S^T k . v) / (v . v). And the token's g and b.
static void put_memory(void) {
    const Config *c = &m->config;
    const int n = (int)ids.n, heads = c->delta_v_heads;
    static float k[MOST][DELTA_DIM], v[MOST][DELTA_DIM], found[DELTA_DIM];
    begin("memory", '[');
    for (int l = 0; l < c->n_layers; l++) {
        const Layer *layer = &m->weights.layers[l];
        for (int head = 0; layer->conv && head < heads; head++) {
            begin(NULL, '{');
            put("layer", l), put("head", head);
            begin("tokens", '[');
            for (int pos = 0; pos < n; pos++) {
                float g, b, kept[MOST], *S = m->state.delta + layer->number * layer_state(c) +
                                             head * DELTA_DIM * DELTA_DIM;
                embed(m, ids.p[pos], m->state.x);
                rope_angles(c, pos, m->state.cos, m->state.sin);
                for (int below = 0; below < l; below++) run_layer(m, below, pos);
                norm_and_quantize(m, layer->rms_att);
                rates_of(layer, m->state.h, c->dim, head, &g, &b);
                run_delta(m, l, pos);  // leaves q, k and v in State.q
                const float *keys = m->state.q + c->delta_k_dim, *values = keys + c->delta_k_dim;
                memcpy(k[pos], keys + head / (heads / c->delta_k_heads) * DELTA_DIM, sizeof(k[0]));
                memcpy(v[pos], values + head * DELTA_DIM, sizeof(v[0]));
                for (int i = 0; i <= pos; i++) {
                    memset(found, 0, sizeof(found));
                    for (int row = 0; row < DELTA_DIM; row++)
                        for (int j = 0; j < DELTA_DIM; j++)
                            found[j] += S[row * DELTA_DIM + j] * k[i][row];
                    kept[i] = dot_of(found, v[i], DELTA_DIM) / dot_of(v[i], v[i], DELTA_DIM);
                }
                begin(NULL, '{');
                put("g", g), put("b", b);
                PUT_ALL("kept", kept, pos + 1);
                end('}');
            }
            end(']');
            end('}');
        }
    }
    end(']');
}

int main(int argc, char **argv) {
    start_platform(&argc, &argv);
    const Bytes text = bytes("The capital of France is");
    const char *model = argc > 1 ? argv[1] : "tests/tiny/tiny.bin";
    engine.options = (Options){.model = model, .mode = GENERATE, .context = -1, .batch = MOST};
    load_model(&engine);
    prepare_places(&engine);
    const Config *c = &m->config;
    encode_raw(tok, text, &ids);
    const int n = (int)ids.n;
    if (n <= FREE || n > MOST / 2) die("book: expected up to %d tokens, found %d", MOST / 2, n);

    begin(NULL, '{');
    if (c->attention_every) {
        put_memory();
        end('}');
        return 0;
    }
#define PUT(field) put(#field, c->field)
    PUT(dim), PUT(hidden_dim), PUT(n_layers), PUT(n_heads), PUT(n_kv_heads), PUT(vocab_size);
    PUT(head_dim), PUT(group_size), PUT(rope_theta), PUT(rms_norm_eps), PUT(rotary_dim);
    put_text("text", text);
    begin("pieces", '[');
    for (Bytes rest = text; rest.n;) {
        const size_t length = piece_length(tok, rest);
        put_merges((Bytes){rest.p, length});
        rest = bytes_from(rest, length);
    }
    end(']');
    put("n_prompt", n);
    const Matrix *wq = &m->weights.layers[0].wq;  // its first row, as it is stored
    begin("row", '[');
    for (int i = 0; i < wq->cols; i++) put(NULL, weight_int(wq, 0, i));
    end(']');
    begin("row_scale", '[');
    for (int g = 0; g < wq->cols / wq->group_size; g++) put(NULL, weight_scale(wq, 0, g));
    end(']');
    PUT_ALL("row_norm", m->weights.layers[0].rms_att, c->dim);

    Sampler greedy = {.repetition = 1};  // temperature 0
    begin("tokens", '[');
    for (int pos = 0; pos < (int)ids.n && pos < MOST; pos++) {
        put_token(pos, pos == n - 1);
        if (pos < n - 1) continue;
        const int id = sample(&greedy, compute_logits(m), c->vocab_size);
        if (is_stop(tok, id)) break;
        ids_add(&ids, id);
    }
    end(']');
    PUT_ALL("ids", ids.p, (int)ids.n);
    put_draws(FREE);
    put_chat("What is the capital of France?");
    put_delta();
    begin("vocabulary", '[');
    for (int i = 0; i < c->vocab_size; i++) put_text(NULL, tok->text[i]);
    end(']');
    PUT_ALL("stop", tok->stop.p, (int)tok->stop.n);
    end('}');
    puts("");
}
