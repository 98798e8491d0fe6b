// What book.c and journey.c share: a token's way through a layer, in steps that can be looked at
#include "../qwen3.c"

enum { MOST_TOKENS = 4096, LIKELIEST = 5 };

static Engine engine;  // the program's state, as main() of qwen3.c has it
static Model *const m = &engine.model;
static const Config *const c = &engine.model.config;
static const Tokenizer *const tok = &engine.tokenizer;

static void open_model(const char *path) {
    engine.options = (Options){.model = path, .mode = GENERATE, .context = -1, .batch = MOST_TOKENS};
    load_model(&engine);
    prepare_places(&engine);
}

// The ids of a raw text, or of a chat's prompt with this question
static Ids encode(Bytes text, bool question) {
    Ids ids = {0};
    Conversation talk = {0};
    if (question) {
        conversation_add(&talk, USER, text);
        render(tok, &talk, 0, false, &ids);
    } else encode_raw(tok, text, &ids);
    return ids;
}

static void begin_token(int id, int pos) {
    embed(m, id, m->state.x);
    rope_angles(c, pos, m->state.cos, m->state.sin);
}

// The first half of run_layer. State then has h, h8, q, a, and what was added to x: out.
static void add_attention(int l, int pos) {
    const Layer *layer = &m->weights.layers[l];
    State *s = &m->state;
    norm_and_quantize(m, layer->rms_att);
    if (layer->conv) run_delta(m, l, pos);
    else run_attention(m, l, pos);
    quantize(s->a8, s->a, layer->wo.cols, c->group_size);
    matmul(s->out, &layer->wo, 0, c->dim, s->a8);
    add(s->x, s->out, c->dim);
}

// The second half. State then has h, h8, up, the products (gate), and what was added to x: out.
static void add_feed_forward(int l) {
    const Layer *layer = &m->weights.layers[l];
    norm_and_quantize(m, layer->rms_ffn);
    if (layer->router) run_experts(m, layer);
    else feed_forward(m, layer, 0, m->state.out);
    add(m->state.x, m->state.out, c->dim);
}

// One head of the token at pos. Its q is in State, all k and v are in the cache. First share[i] is
// the score of token i, then its share, and a is the sum of the values, each times its share.
static void attend_simply(int l, int head, int pos, float *share, float *a) {
    const int n = pos + 1, size = c->head_dim, kv_head = head / (c->n_heads / c->n_kv_heads);
    const float *q = m->state.q + head * size;
    for (int i = 0; i < n; i++)
        share[i] = attention_score(q, in_cache(m, m->state.keys, l, i, kv_head), size);
    const float total = softmax_terms(share, n, max_of(share, n));
    for (int i = 0; i < n; i++) share[i] /= total;
    for (int j = 0; j < size; j++) {
        a[j] = 0;
        for (int i = 0; i < n; i++)
            a[j] += share[i] * in_cache(m, m->state.values, l, i, kv_head)[j];
    }
}

// The likeliest next tokens, as if no further layer followed, and their probabilities
static void find_guesses(int count, int *id, float *p) {
    float *logits = compute_logits(m);
    const float total = softmax_terms(logits, c->vocab_size, max_of(logits, c->vocab_size));
    for (int i = 0; i < count; i++) {
        id[i] = argmax(logits, c->vocab_size);
        p[i] = logits[id[i]] / total;
        logits[id[i]] = 0;
    }
}

// A text as a JSON string, good until the next call
static const char *json(Bytes text) {
    static Buffer line;
    line.n = 0;
    buffer_add_json(&line, text, true);
    buffer_add(&line, (Bytes){(uint8_t *)"", 1});
    return (char *)line.p;
}
