/* qwen3.c - Qwen3 inference in one C file: no packages, just libc, libm and threads. MIT license.

     ./qwen3 model.bin -i "What is the capital of France?"

   A token is a piece of text, often a word or a part of one. Its number is its id. A language model
   computes for every token of its vocabulary a score: how well would it come next? It computes
   with learned numbers, the weights: in training it predicted each next token of a great many
   texts, and the weights were changed little by little until it did this well. This program only
   uses them. (export.py makes model.bin and its tokenizer file from a checkpoint, the published
   files of a trained model.) It cuts a text into tokens (encode_raw, render), runs them through the
   model (forward), scores all tokens of the vocabulary (classify), draws one of them (sample),
   writes it and appends it to the text. This token runs next, and so on until the answer ends.

   Inside the model, each token of the text is a vector x (dim), the residual stream. (A name is
   followed by its shape in parentheses.) x begins as the token's row of the embedding table. Each
   layer then adds two things to it: what attention finds in this token and those before it, and
   what a feed-forward network computes from the sum. For attention, matrices make of each token a
   query q (what it looks for), a key k (what it is found by) and a value v (what it gives to those
   that find it). The dot products of its query with the keys of all positions up to its own become
   shares that add up to 1 (softmax). The result is the sum of the values, each times its share.
   This happens n_heads times side by side: each head has its own part of q (head_dim) and gives
   other shares to the positions. The KV cache keeps, for each layer, the keys K and the values V of
   all positions so far, a row each. They never change, as no token looks at a later one: so each
   token runs once. One layer computes (HF's name for it is Qwen3DecoderLayer; HF, here and below,
   is Hugging Face's Python library transformers, with which the tests compare the results)

     h = rmsnorm(x, rms_att)                  rmsnorm(x, w) = w * x / sqrt(mean(x^2) + eps)
     q = Wq h, k = Wk h, v = Wv h             q: n_heads vectors (head_dim); k, v: n_kv_heads each
     q = rope(rmsnorm(q, q_norm), pos)        for each head; pos is the token's position
     k = rope(rmsnorm(k, k_norm), pos)
     K = [K; k], V = [V; v]                   k and v are appended to the KV cache
     a = softmax(q . K / sqrt(head_dim)) V    for each query head; softmax(z) = exp(z) / sum(exp(z))
     x = x + Wo a                             a: that of all heads together (q_dim)
     h = rmsnorm(x, rms_ffn)
     x = x + W2 (silu(W1 h) * (W3 h))         SwiGLU; silu(z) = z / (1 + exp(-z)); W1 and W3 are
                                              (hidden_dim, dim), W2 is (dim, hidden_dim)

   Wq h is a matrix times a vector, q . K are the dot products of q with the rows of K, u * v
   multiplies element by element. All W, rms_ and _norm are weights; eps is mostly 1e-6. Before it
   is multiplied with a matrix, a vector is rounded to 8 bits, which the code writes Q8(h).

     Norm.    rmsnorm brings vectors of any magnitude to about the same, so x may grow from layer to
              layer. The norms of q and k (QK-norm) bound q . k.
     Scale.   q . k sums head_dim products, some positive and some negative. Its magnitude is about
              sqrt(head_dim) times that of one product. Dividing by this makes heads of any width
              alike. Else softmax would give nearly all to one position.
     Sharing. n_heads / n_kv_heads query heads use the same K and V: so the cache is smaller.
     Gate.    W1 is the gate: silu(W1 h) scales each element of W3 h. Without it, W2 W3 would be one
              matrix.
     Order.   rope rotates pairs of elements of q and k by angles that grow with pos: so q . k
              depends on the distance of the two positions.

   After the last layer, the scores, called logits, are

     logits = Wcls rmsnorm(x, rms_final)      one for each token of the vocabulary

   softmax(logits) is the probability, by the model, that each token follows the one that x belongs
   to. So an answer's first token comes from the last x of the prompt. Logits from earlier x are
   needed only to say how well the model predicts a given text (-m perplexity).

   To learn how a language model runs, read Part I: it defines everything that is computed, one
   token at a time, in plain C. `make plain` builds a program that computes so, for a debugger.
   Part III computes the same bits with all threads and SIMD instructions, for many tokens at once.
   A port to a new CPU begins with `make plain` and then needs only "SIMD primitives".

   Part I, the model               Part II, the program       Part III, the machine
     Types, with their shapes        Errors and memory          Vector math
     Math                            The model file             SIMD primitives
     Quantization, matrix product    The tokenizer file         The KV cache
     Embedding and rope              Merging                    A machine for -DPLAIN
     Attention                       Unicode                    Threads
     The feed-forward network        Many texts at once         A batch
     The whole model                 Drafts                     Matrix products
     Text to tokens                  Writing                    Attention
     The chat format                 Requests                   The work of a layer
     The sampler                     Conversation               The memory of a run
     The main loop                   The modes                  POSIX and Windows
                                     JSON
                                     Lists
                                     Options and main                                            */

#if __SIZEOF_POINTER__ < 8 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "qwen3.c needs a 64-bit little-endian machine: models are mapped as they are"
#endif

#define VERSION "4.0"
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <float.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

// ================================================================================================
// PART I. THE MODEL
// ================================================================================================

#define INLINE static inline __attribute__((always_inline, unused))

static volatile sig_atomic_t interrupted;  // Ctrl-C was pressed

// Writes one line to stderr, of the form "qwen3: WHERE: WHAT, expected X, found Y" (Part II).
static void report(const char *fmt, ...);

#define die(...) (report(__VA_ARGS__), exit(EXIT_FAILURE))  // a file, memory or model error

INLINE int min_int(int a, int b) { return a < b ? a : b; }
INLINE size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

// ------------------------------------------------------------------------------------------------
// Types, with their shapes: (rows, cols) = (out, in), as torch.nn.Linear stores its weight. Names
// on the right are those of HF's tensors.

typedef struct {
    int dim;                // width of the residual stream; HF hidden_size
    int hidden_dim;         // width of the feed-forward, or of one expert; HF intermediate_size, or
                            // moe_intermediate_size
    int n_layers;
    int n_heads;            // query heads
    int n_kv_heads;         // key and value heads: n_heads / n_kv_heads query heads share one
    int vocab_size;
    int max_seq_len;        // positions the model was made for; HF max_position_embeddings
    int head_dim;           // n_heads * head_dim need not be dim
    int shared_classifier;  // 1: Wcls is the token embedding; HF tie_word_embeddings
    int group_size;         // see Quantization; divides dim, q_dim and hidden_dim
    int layer_bits;         // of a weight of the layers' matrices, 8 or 4; the others have 8
    int8_t levels[16];      // with 4 bits: the int8 values that a weight can have
    float rope_theta;
    float rms_norm_eps;
    int rope_scaling;       // not 0: for longer texts rope is scaled, by the next two
    float rope_factor;      // on cos and sin
    const float *rope_freq; // (head_dim / 2) radians per position
    int qkv_bias;           // 1: Wq, Wk and Wv have biases (Qwen2)
    int no_qk_norm;         // 1: no QK-norm (Qwen2)
    int n_experts;          // 0: not a mixture of experts; HF num_experts
    int n_experts_used;     // by each token; HF num_experts_per_tok
    int no_topk_norm;       // 1: the shares of these do not add up to 1; HF norm_topk_prob = false
    int q_dim;              // n_heads * head_dim
    int kv_dim;             // n_kv_heads * head_dim
} Config;

// A quantized matrix: see Quantization and the matrix product.
typedef struct {
    int rows;
    int cols;
    int group;             // consecutive weights of a row that have one scale
    int bits;              // of a weight, 8 or 4
    const int8_t *bytes;   // (rows, cols * bits / 8)  8 bits: int8; 4: two weights in a byte
    const void *scales;    // (rows, cols / group)     8 bits: float; 4: see half_float
    const int8_t *levels;  // (16) with 4 bits         the int8 that a nibble stands for
} Matrix;

typedef struct {
    const float *rms_att;  // (dim)                       input_layernorm
    const float *rms_ffn;  // (dim)                       post_attention_layernorm
    const float *q_norm;   // (head_dim) or NULL          self_attn.q_norm
    const float *k_norm;   // (head_dim) or NULL          self_attn.k_norm
    const float *bq;       // (q_dim) or NULL             self_attn.q_proj.bias
    const float *bk;       // (kv_dim) or NULL            self_attn.k_proj.bias
    const float *bv;       // (kv_dim) or NULL            self_attn.v_proj.bias
    Matrix wq;             // (q_dim, dim)                self_attn.q_proj
    Matrix wk;             // (kv_dim, dim)               self_attn.k_proj
    Matrix wv;             // (kv_dim, dim)               self_attn.v_proj
    Matrix wo;             // (dim, q_dim)                self_attn.o_proj
    // With experts, w1, w3 and w2 hold the rows of expert 0, then those of expert 1, and so on.
    Matrix w1;             // (hidden_dim, dim)           mlp.gate_proj
    Matrix w3;             // (hidden_dim, dim)           mlp.up_proj
    Matrix w2;             // (dim, hidden_dim)           mlp.down_proj
    const float *router;   // (n_experts, dim) or NULL    mlp.gate
} Layer;

typedef struct {
    Matrix embedding;        // (vocab_size, dim)             model.embed_tokens
    Layer *layers;           // (n_layers)                    model.layers.N
    const float *rms_final;  // (dim)                         model.norm
    Matrix classifier;       // (vocab_size, dim)             lm_head, Wcls
} Weights;

typedef struct {   // a vector (cols) as int8 values, and a scale for each group: see Quantization
    int8_t *q8;    // (cols)
    float *scale;  // (cols / group)
} Q8;

typedef struct Text Text;  // a text that runs through the model: see The main loop

typedef struct {       // a token of a text
    int token;         // its id
    int pos;           // its position in the text
    const Text *text;
    bool needed;       // x is needed after the last layer: for logits, or by embed_text
} Row;

// Everything that changes while the model runs. forward() runs a batch of rows, a token each. The
// rows of a text are consecutive tokens; those of the next text come after them.
typedef struct {
    int seq_len;         // the maximum number of positions of a text (option -c)
    int batch;           // the maximum number of rows
    Row *rows;           // (batch)
    float *cos;          // (batch, head_dim / 2) of the angles of rope at a row's position
    float *sin;          // (batch, head_dim / 2)
    float *x;            // (batch, dim)          the residual stream
    float *logits;       // (logit_rows, vocab_size)
    int logit_rows;      // the maximum number of rows that one call of classify scores
    float *cache;        // keys and values, in an order that only key_at and value_at know
    int blocks;          // of the cache; texts that begin alike share blocks
    int block_len;       // positions of a block: it has their keys and values in all layers
    // One token's, in the layer that runs:
    float *h;            // (dim)          rmsnorm(x)
    Q8 xq;               // (dim)          Q8(h)
    float *q;            // (q_dim)        its queries
    float *k;            // (kv_dim)       its keys: they go to the cache
    float *v;            // (kv_dim)       its values: so do they
    float *a;            // (q_dim)        what attention finds for each query
    Q8 aq;               // (q_dim)        Q8(a)
    float *gate;         // (hidden_dim)   W1 h, then silu(W1 h) * (W3 h)
    float *up;           // (hidden_dim)   W3 h
    Q8 hq;               // (hidden_dim)   Q8(silu(W1 h) * (W3 h))
    float *term;         // (n_experts)    Wr h, then its exp
    float *share;        // (n_experts)    the share of each chosen expert
    float *out;          // (dim)          what is added to x
    float *y;            // (dim)          one expert's output
    struct Batch *b;     // Part III only: the same for all rows
} State;

typedef struct {
    Config config;
    Weights weights;
    State state;
} Model;

// ------------------------------------------------------------------------------------------------
// Math: what a layer computes on one vector. What is only declared is in Part III, Vector math: it
// depends on the CPU, or is written so that compilers vectorize it.
//
// Equal bits: each sum of floats has one order, which Part III keeps. So a text's results never
// depend on the number of threads, the cut into batches or other texts beside it. They do depend on
// the build, as only some CPUs have fma, and on the C library, which has powf, cosf and sinf.

// a * b + c, rounded once where the CPU has fma, else twice. Nothing else is fused: the Makefile
// says -ffp-contract=off.
static float mul_add(float a, float b, float c);

// exp(x), with an error of at most 2 units in the last place; 0 for x < -87.7, exp(88) for x > 88,
// NaN for NaN
static float fast_exp(float x);

// The largest of x (n > 0; anything if one is NaN); the largest |x|, or NaN if one is NaN
static float max_of(const float *x, int n);
static float max_abs(const float *x, int n);

// The float with these 16 bits: 1 of sign, 5 of exponent, 10 of fraction (IEEE 754 half precision)
static float half_float(uint16_t half);

// sum(x) or sum(x^2), x (n). Element i goes to partial sum i % 16. That is the same order whether a
// CPU adds 4, 8 or 16 floats at once.
INLINE float sum_of(const float *x, int n, const bool squared) {
    float sums[16] = {0};
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        for (int j = 0; j < 16; j++) sums[j] += squared ? x[i + j] * x[i + j] : x[i + j];
    }
    for (; i < n; i++) sums[i % 16] += squared ? x[i] * x[i] : x[i];
    for (int half = 8; half > 0; half /= 2) {
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    }
    return sums[0];
}

// a . b, both (n), n a multiple of 16: the products are added in the order of sum_of.
INLINE float dot_of(const float *a, const float *b, int n) {
    float sums[16] = {0};
    for (int i = 0; i < n; i += 16) {
        for (int j = 0; j < 16; j++) sums[j] = mul_add(a[i + j], b[i + j], sums[j]);
    }
    return sum_of(sums, 16, false);
}

// out = w * x / sqrt(mean(x^2) + eps), all (n): HF Qwen3RMSNorm. Part III calls it as well.
static void rmsnorm(float *out, const float *x, const float *w, int n, float eps) {
    float scale = 1 / sqrtf(sum_of(x, n, true) / n + eps);
    for (int i = 0; i < n; i++) out[i] = w[i] * (x[i] * scale);
}

// Replaces x (n) by exp(x - max) and returns the sum: dividing by it completes the softmax. max is
// at least that of x. The factor exp(-max) cancels, but keeps each term from overflow.
static float softmax_terms(float *x, int n, float max) {
    for (int i = 0; i < n; i++) x[i] = fast_exp(x[i] - max);
    return sum_of(x, n, false);
}

// gate = silu(gate) * up, all (n): HF Qwen3MLP
static void silu_times(float *gate, const float *up, int n) {
    for (int i = 0; i < n; i++) gate[i] = gate[i] / (1 + fast_exp(-gate[i])) * up[i];
}

// ------------------------------------------------------------------------------------------------
// Quantization and the matrix product. For one token, reading the weights from memory takes longer
// than the arithmetic. So all matrices but the router are quantized: they take fewer bytes.
//
// With 8 bits, a group of group_size (up to 256) consecutive weights of a row is stored as int8
// values and one float scale: a weight is its int8 times the scale. (A large weight makes the steps
// between values coarse, but those of its group alone.) The layers' matrices may have 4 bits
// instead: then a weight is an index into a table of 16 int8 values, the model's levels, and a
// scale has 16 bits. Just before a vector is multiplied with such a matrix, it is quantized, too,
// always to 8 bits. So the dot product of a group of weights and a group of the vector is a sum of
// integers, at most 256 * 128 * 127 < 2^22: exact, even as a float. The two scales multiply it.

// Weight i of group g, without its scale. Groups are numbered through the matrix, row after row.
// With 4 bits, a group takes group / 2 bytes. Byte b holds two indices into levels: in its low
// nibble that of weight b, in its high one that of weight b + group / 2.
INLINE int weight_q(const Matrix *w, size_t g, int i) {
    const int half = w->group / 2;
    if (w->bits == 8) return w->bytes[g * w->group + i];
    const int8_t *pairs = w->bytes + g * half;
    return w->levels[i < half ? pairs[i] & 15 : pairs[i - half] >> 4 & 15];
}

INLINE float weight_scale(const Matrix *w, size_t g) {
    return w->bits == 8 ? ((const float *)w->scales)[g]
                        : half_float(((const uint16_t *)w->scales)[g]);
}

// out = Q8(x), x (n). The scale of a group is max|x| / 127, and its values are x * (127 / max|x|),
// rounded to the nearest integer, of two equally near ones to the even one (rintf). Where the scale
// would be below the smallest normal number, all is 0. Where x has a NaN or infinity, that is the
// scale, and the values are 0: so every product with the group is NaN.
static void quantize(Q8 out, const float *x, int n, int group) {
    for (int g = 0; g < n / group; g++, x += group) {
        const float max = max_abs(x, group);
        out.scale[g] = max < FLT_MIN * 127 ? 0 : max / 127;
        const float inverse = out.scale[g] != 0 ? 127 / max : 0;
        for (int i = 0; i < group; i++) {
            out.q8[g * group + i] = isfinite(max) ? (int8_t)rintf(x[i] * inverse) : 0;
        }
    }
}

// W[r] . x: row r of W (rows, cols) times x (cols). The products of a group are added as integers,
// the groups as floats, from the first to the last.
static float dot_row(const Matrix *w, int r, Q8 x) {
    const int n_groups = w->cols / w->group;
    float sum = 0;
    for (int g = 0; g < n_groups; g++) {
        const size_t at = (size_t)r * n_groups + g;
        int dot = 0;
        for (int i = 0; i < w->group; i++) dot += weight_q(w, at, i) * x.q8[g * w->group + i];
        sum = mul_add((float)dot * weight_scale(w, at), x.scale[g], sum);
    }
    return sum;
}

// out = W x, where W is rows first .. first + rows - 1 of the matrix
static void matmul(float *out, const Matrix *w, int first, int rows, Q8 x) {
    for (int i = 0; i < rows; i++) out[i] = dot_row(w, first + i, x);
}

static void add(float *x, const float *y, int n) {
    for (int i = 0; i < n; i++) x[i] += y[i];
}

// h = rmsnorm(x, w), xq = Q8(h)
static void norm(const Model *m, const float *x, const float *w) {
    const Config *c = &m->config;
    rmsnorm(m->state.h, x, w, c->dim, c->rms_norm_eps);
    quantize(m->state.xq, m->state.h, c->dim, c->group_size);
}

// ------------------------------------------------------------------------------------------------
// Embedding and rope. A token's way begins: from here on a token is row t of State.rows.
//
// rope rotates each pair (q[j], q[j + head_dim/2]), j < head_dim/2, by the angle pos * theta^(-2j /
// head_dim), and k in the same way. So q . k depends on the two positions only through their
// distance. Nothing else in attention knows about order: without rope, the same keys and values in
// another order would give the same a. theta is mostly 1e6. Pair 0 turns by 1 radian a position,
// and tells neighbours apart, but after 6 positions it has gone round nearly once. The last pair
// turns almost theta times as slowly and tells near from far.

// The frequency of pair j in radians per position: theta^(-2j / head_dim). If rope is scaled, for
// longer texts than those of the model's training (YaRN, arXiv 2309.00071), the file has other
// frequencies and a factor on cos and sin, which makes q . k larger. export.py computes them.
static float rope_frequency(const Config *c, int j) {
    return c->rope_scaling ? c->rope_freq[j] : 1 / powf(c->rope_theta, 2 * j / (float)c->head_dim);
}

// Prepares row t: x, the token's row of the embedding table; and the cos and sin of the rope angles
// of its position.
static void embed(Model *m, int t) {
    const Matrix *table = &m->weights.embedding;
    const Config *c = &m->config;
    const State *s = &m->state;
    const Row *row = &s->rows[t];
    const int dim = c->dim, group = c->group_size, half = c->head_dim / 2;
    const float factor = c->rope_scaling ? c->rope_factor : 1;
    for (int i = 0; i < dim; i++) {
        const size_t g = (size_t)row->token * (dim / group) + i / group;
        s->x[(size_t)t * dim + i] = weight_q(table, g, i % group) * weight_scale(table, g);
    }
    for (int j = 0; j < half; j++) {
        const float angle = (float)row->pos * rope_frequency(c, j);
        s->cos[(size_t)t * half + j] = cosf(angle) * factor;
        s->sin[(size_t)t * half + j] = sinf(angle) * factor;
    }
}

// Rotates each pair (x[j], x[j + half]) of one head x (2 * half) by the angle whose cos[j] and
// sin[j] embed() has computed from the position: HF apply_rotary_pos_emb
static void rope(float *x, const float *cos, const float *sin, int half) {
    for (int j = 0; j < half; j++) {
        float a = x[j], b = x[j + half];
        x[j] = a * cos[j] - b * sin[j];
        x[j + half] = b * cos[j] + a * sin[j];
    }
}

// ------------------------------------------------------------------------------------------------
// Attention

// The keys and values of kv head kv_head in layer l, of all positions of a text
typedef struct {
    const Model *m;
    const Text *text;
    int l;
    int kv_head;
} KvHead;

// Where element j of the key, or of the value, of position pos is in the KV cache (Part III)
static float *key_at(KvHead h, int pos, int j);
static float *value_at(KvHead h, int pos, int j);

static KvHead kv_head_of(const Model *m, int l, int t, int kv_head) {
    return (KvHead){m, m->state.rows[t].text, l, kv_head};
}

// x (head_dim), one head's q or k of row t, becomes rope(rmsnorm(x)); without weights, rope(x).
static void norm_and_rope(const Model *m, int t, float *x, const float *norm_weight) {
    const int head_dim = m->config.head_dim, half = head_dim / 2;
    const size_t at = (size_t)t * half;
    if (norm_weight) rmsnorm(x, x, norm_weight, head_dim, m->config.rms_norm_eps);
    rope(x, m->state.cos + at, m->state.sin + at, half);
}

// q = rope(rmsnorm(Wq xq)), k = rope(rmsnorm(Wk xq)), v = Wv xq; k and v go to the KV cache. Qwen2
// and Qwen2.5 have no QK-norm, but biases: q = rope(Wq xq + bq), and so on.
static void qkv(const Model *m, int l, int t) {
    const Config *c = &m->config;
    const State *s = &m->state;
    const Layer *w = &m->weights.layers[l];
    const int head_dim = c->head_dim, pos = s->rows[t].pos;
    matmul(s->q, &w->wq, 0, c->q_dim, s->xq);
    matmul(s->k, &w->wk, 0, c->kv_dim, s->xq);
    matmul(s->v, &w->wv, 0, c->kv_dim, s->xq);
    if (w->bq) {
        add(s->q, w->bq, c->q_dim);
        add(s->k, w->bk, c->kv_dim);
        add(s->v, w->bv, c->kv_dim);
    }
    for (int i = 0; i < c->n_heads; i++) norm_and_rope(m, t, s->q + i * head_dim, w->q_norm);
    for (int i = 0; i < c->n_kv_heads; i++) {
        const KvHead h = kv_head_of(m, l, t, i);
        float *k = s->k + i * head_dim, *v = s->v + i * head_dim;
        norm_and_rope(m, t, k, w->k_norm);
        for (int j = 0; j < head_dim; j++) *key_at(h, pos, j) = k[j];
        for (int j = 0; j < head_dim; j++) *value_at(h, pos, j) = v[j];
    }
}

// q . K[pos] / sqrt(head_dim), q (head_dim) of one query head
static float attention_score(KvHead h, const float *q, int pos) {
    const int head_dim = h.m->config.head_dim;
    float dot = 0;
    for (int j = 0; j < head_dim; j++) dot = mul_add(*key_at(h, pos, j), q[j], dot);
    return dot * (1 / sqrtf((float)head_dim));
}

// Attention of one query head of row t: a = softmax(q . K / sqrt(head_dim)) V with a (head_dim), K
// and V (len, head_dim). The positions come in spans: so the array `score` is short. Two sums grow:
// of the terms (total), and of the terms times the values (a). Both are relative to the largest
// score so far, as exp of a large score would be infinite. Where a span has a larger one, the
// factor `keep` makes smaller what was summed before (online softmax).
enum { SPAN = 256 };

static void attend(const Model *m, int l, int t, int head) {
    const Config *c = &m->config;
    const KvHead h = kv_head_of(m, l, t, head / (c->n_heads / c->n_kv_heads));
    const int head_dim = c->head_dim;
    const int len = m->state.rows[t].pos + 1;  // causal: a token sees itself and those before it
    const float *q = m->state.q + head * head_dim;
    float *a = m->state.a + head * head_dim, score[SPAN], largest = -FLT_MAX, total = 0;
    memset(a, 0, head_dim * sizeof(float));
    for (int start = 0; start < len; start += SPAN) {
        const int n = min_int(SPAN, len - start);
        for (int i = 0; i < n; i++) score[i] = attention_score(h, q, start + i);
        const float before = largest;
        largest = fmaxf(largest, max_of(score, n));
        const float keep = fast_exp(before - largest);                   // 0 in the first span
        total = mul_add(total, keep, softmax_terms(score, n, largest));  // score: now the terms
        for (int j = 0; j < head_dim; j++) {
            float sum = 0;
            for (int i = 0; i < n; i++) sum = mul_add(*value_at(h, start + i, j), score[i], sum);
            a[j] = mul_add(a[j], keep, sum);
        }
    }
    for (int j = 0; j < head_dim; j++) a[j] *= 1 / total;
}

// ------------------------------------------------------------------------------------------------
// The feed-forward network, and a mixture of experts (HF Qwen3MoeSparseMoeBlock)
//
// A mixture of experts has many experts, each with its own W1, W2 and W3, and a router Wr. For each
// token the router chooses the few experts that run: so a model has many weights, and a token needs
// few of them. In place of x = x + W2 (silu(W1 h) * (W3 h)), a layer computes
//
//   share = softmax(Wr h)                    one number for each expert
//   S = the n_experts_used experts with the largest shares
//   share = share / (sum of share over S)    so that they add up to 1; some models skip this
//   x = x + sum of share[e] W2[e] (silu(W1[e] h) * (W3[e] h)) over e in S

// out = W2 Q8(silu(W1 xq) * (W3 xq)), with the matrices of expert e; e is 0 without experts
static void feed_forward(const Model *m, const Layer *w, int e, float *out) {
    const int dim = m->config.dim, hidden_dim = m->config.hidden_dim;
    const State *s = &m->state;
    matmul(s->gate, &w->w1, e * hidden_dim, hidden_dim, s->xq);
    matmul(s->up, &w->w3, e * hidden_dim, hidden_dim, s->xq);
    silu_times(s->gate, s->up, hidden_dim);
    quantize(s->hq, s->gate, hidden_dim, m->config.group_size);
    matmul(out, &w->w2, e * dim, dim, s->hq);
}

// Makes the share of each expert from term, Wr h, which is overwritten; both (n_experts). Each of
// the n_experts_used largest (of equal ones the first) gets its exp, divided by the sum of theirs.
// (The sum over all experts, as in a softmax, would cancel. With no_topk_norm it divides.) Returns
// false if term has a NaN or +infinity, which makes the softmax NaN: then no expert runs, all of
// share is 0.
static bool choose_experts(const Config *c, float *term, float *share) {
    const float all = softmax_terms(term, c->n_experts, max_of(term, c->n_experts));
    float chosen = 0;
    memset(share, 0, c->n_experts * sizeof(float));
    if (isnan(all)) return false;
    for (int i = 0; i < c->n_experts_used; i++) {
        int best = 0;
        for (int e = 1; e < c->n_experts; e++) best = term[e] > term[best] ? e : best;
        share[best] = term[best];
        chosen += term[best];
        term[best] = -1;  // less than all terms: chosen once
    }
    for (int e = 0; e < c->n_experts; e++) share[e] /= c->no_topk_norm ? all : chosen;
    return true;
}

// out = the sum of the chosen experts' outputs, each times its share, in ascending order of e
static void experts(const Model *m, const Layer *w) {
    const int dim = m->config.dim, n_experts = m->config.n_experts;
    const State *s = &m->state;
    for (int e = 0; e < n_experts; e++) {
        s->term[e] = dot_of(w->router + (size_t)e * dim, s->h, dim);
    }
    const bool chosen = choose_experts(&m->config, s->term, s->share);
    memset(s->out, 0, dim * sizeof(float));
    for (int e = 0; e < n_experts; e++) {
        if (s->share[e] == 0) continue;
        feed_forward(m, w, e, s->y);
        for (int i = 0; i < dim; i++) s->out[i] += s->share[e] * s->y[i];
    }
    if (!chosen) s->out[0] = NAN;  // reaches the logits, and the answer ends
}

// ------------------------------------------------------------------------------------------------
// The whole model: the layers one after the other, then the scores

// Layer l for row t
static void layer(const Model *m, int l, int t) {
    const Config *c = &m->config;
    const State *s = &m->state;
    const Layer *w = &m->weights.layers[l];
    float *x = s->x + (size_t)t * c->dim;

    norm(m, x, w->rms_att);              // h = rmsnorm(x), xq = Q8(h)
    qkv(m, l, t);                        // q = rope(rmsnorm(Wq xq)); k, v go to the cache
    for (int head = 0; head < c->n_heads; head++) {
        attend(m, l, t, head);           // a = softmax(q . K / sqrt(head_dim)) V
    }
    quantize(s->aq, s->a, c->q_dim, c->group_size);
    matmul(s->out, &w->wo, 0, c->dim, s->aq);
    add(x, s->out, c->dim);              // x = x + Wo aq

    norm(m, x, w->rms_ffn);              // h = rmsnorm(x), xq = Q8(h)
    if (w->router) experts(m, w);        // out = the sum of share[e] times expert e's output
    else feed_forward(m, w, 0, s->out);  // out = W2 Q8(silu(W1 xq) * (W3 xq))
    add(x, s->out, c->dim);              // x = x + out
}

// logits (vocab_size) = Wcls Q8(rmsnorm(x, rms_final)) for row t
static void scores(const Model *m, int t, float *logits) {
    norm(m, m->state.x + (size_t)t * m->config.dim, m->weights.rms_final);
    matmul(logits, &m->weights.classifier, 0, m->config.vocab_size, m->state.xq);
}

// layer(m, l, t) for t = 0, 1 .. n - 1 (Part III): with -DPLAIN just so, else for all rows at once,
// to read the weights once. Tokens of one text can run together: in layer l, a row needs the k and
// v of the rows before it in layer l, which stand in the cache by then, and nothing of other texts.
static void layer_all(Model *m, int l, int n);

// scores(m, first + i, logits + i * vocab_size) for i = 0 .. count - 1, count <= logit_rows, where
// logits is State.logits. Returns it. (Part III, the other place where -DPLAIN differs)
static float *classify(Model *m, int first, int count);

// Runs State.rows 0 .. n - 1, n <= batch. The rows of a text stand together, in order; the cache
// must hold the positions before them, and afterwards holds these as well. In the end the rows that
// are needed, with their x after the last layer, are moved to the front. False: Ctrl-C came.
static bool forward(Model *m, int n) {
    const State *s = &m->state;
    const size_t dim = m->config.dim;
    for (int t = 0; t < n; t++) embed(m, t);
    for (int l = 0; l < m->config.n_layers; l++) {
        if (interrupted) return false;
        layer_all(m, l, n);
    }
    for (int t = 0, to = 0; t < n; t++) {
        if (!s->rows[t].needed) continue;
        s->rows[to] = s->rows[t];
        memmove(s->x + to++ * dim, s->x + t * dim, dim * sizeof(float));
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// Text to tokens. The text is cut at added tokens: marks such as <|im_start|>, a token each, which
// tell the model what no text can: here begins a message. (If a user spells one out in a chat, that
// is plain text.) Between them it is normalized: in Unicode's form NFC, e and a combining
// accent (U+0301) become one character (U+00E9), so that both spellings get the same ids. Then a
// regular expression cuts it into pieces, mostly words with the space before them: "Hello, world"
// becomes "Hello" "," " world". Then byte-pair encoding: each byte of a piece begins as a token of
// its own; as long as two neighbours together are a token of the vocabulary, the pair whose token
// has the highest score is merged: l o w e r -> lo w e r -> lo w er -> low er -> lower. (This score
// is the merge's priority, and none of the model's scores.) Vocabulary and scores were made before
// training, from the most frequent pairs of the training texts: the model only knows texts that are
// cut in this way.

typedef struct {  // a view of bytes that something else owns. Texts are never NUL-terminated here.
    const uint8_t *p;
    size_t n;
} Bytes;

typedef struct {  // bytes that grow
    uint8_t *p;
    size_t n;
    size_t cap;  // p has room for so many
} Buffer;

typedef struct {  // token ids that grow
    int *p;
    size_t n;
    size_t cap;  // p has room for so many
} Ids;

static void buffer_add(Buffer *b, Bytes text);
static void ids_add(Ids *ids, int id);
static size_t find_last(Bytes text, Bytes part);  // the offset after its last occurrence, or 0

static Bytes bytes(const char *s) { return (Bytes){(const uint8_t *)s, strlen(s)}; }
static Bytes bytes_of(const Buffer *b) { return (Bytes){b->p, b->n}; }

static Bytes bytes_from(Bytes b, size_t start) {  // b.p may be NULL if `start` is 0
    return (Bytes){start ? b.p + start : b.p, b.n - start};
}

enum { OTHER, LETTER, NUMBER, SPACE, END };  // classes of characters; END: after the text
enum { ADDED = 1, SPECIAL = 2 };  // bits of Tokenizer.kind; SPECIAL: not written in answers
enum { SYSTEM, USER, ASSISTANT };  // who wrote a message
typedef enum { CHAT, GENERATE, TOKENIZE, PERPLEXITY, EMBED, N_MODES } Mode;

typedef struct {       // the text around the messages of a conversation: see The chat format
    Bytes start;       // before all else
    Bytes no_system;   // then, if the first message is not a system message
    Bytes open[3];     // before a message, by role
    Bytes close[3];    // after it
    Bytes answer[2];   // where the model's answer begins: without thinking before it (mostly an
                       // empty <think> block), with it
    Bytes strip;       // </think>: everything up to the last one is cut from an earlier answer
    Bytes trim;        // and then any of these characters from the start of the rest
} ChatFormat;

typedef struct Tokenizer {
    int vocab_size;          // that of Config, from which tokenizer_load gets it
    Bytes *text;             // (vocab_size)
    float *score;            // (vocab_size) of the merge that makes the token: higher ones first
    uint8_t *kind;           // (vocab_size) ADDED, SPECIAL
    int end_of_text;         // <|endoftext|>
    int think;               // <think>, which begins a model's thinking, or -1
    int end_think;           // </think>, which ends it, or -1
    Ids head;                // what HF's post-processor puts before every raw text
    Ids tail;                // and after it
    Ids stop;                // each ends an answer
    float temperature;       // the checkpoint's advice, this and the next three: see Sampler
    float top_p;
    float repetition;
    int top_k;
    Mode mode;               // what the model is made for
    ChatFormat chat;
    struct Tables *tables;   // Part II only: how tokens are found, the classes of characters, NFC
} Tokenizer;

typedef struct {  // one character of a text
    uint32_t c;   // code point; a byte that is not valid UTF-8 gets a number above all of them
    int n;        // its bytes; 0 after the text
    int class;    // OTHER, LETTER, NUMBER, SPACE or END
    bool active;  // normalization may change it: see normalize
} Char;

// Part II: the character at offset `at` of a text; at the text's end, 0 bytes of class END
static Char char_at(const Tokenizer *tok, Bytes text, size_t at);

// The end of the run of characters of one class that begins at `at`
static size_t run_end(const Tokenizer *tok, Bytes text, size_t at, int class) {
    for (Char c; (c = char_at(tok, text, at)).class == class;) at += c.n;
    return at;
}

// The length of (?i:'s|'t|'re|'ve|'m|'ll|'d) at the start of the text, or 0. When case is ignored,
// the long s (U+017F) counts as an s.
static size_t contraction(Bytes text) {
    static const char *const all[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'\u017F"};
    for (int i = 0; i < 8; i++) {
        size_t n = strlen(all[i]);
        if (n <= text.n && strncasecmp((const char *)text.p, all[i], n) == 0) return n;
    }
    return 0;
}

INLINE bool is_newline(uint32_t c) { return c == '\n' || c == '\r'; }

// The length of the white space at the start of the text: up to its last newline, if it has one;
// else without its last character, if it has several and something follows; else all of it.
static size_t space_length(const Tokenizer *tok, Bytes text) {
    size_t end = 0, last = 0, newline = 0;
    for (Char c; (c = char_at(tok, text, end)).class == SPACE;) {
        last = end;
        end += c.n;
        if (is_newline(c.c)) newline = end;
    }
    if (newline) return newline;
    return end == text.n || last == 0 ? end : last;
}

// The length of the first piece of a nonempty text: Qwen's regular expression. The first
// alternative that matches wins.
//   1   (?i:'s|'t|'re|'ve|'m|'ll|'d)
//   2   [^\r\n\p{L}\p{N}]?\p{L}+           letters, after at most one other character
//   3   \p{N}                              one numeric character
//   4   [ ]?[^\s\p{L}\p{N}]+[\r\n]*        others, with one space before and all newlines after
//   5-7 \s*[\r\n]+  or  \s+(?!\S)  or  \s+   white space: see space_length
static size_t piece_length(const Tokenizer *tok, Bytes text) {
    size_t end = contraction(text);
    if (end) return end;                                                             // 1
    Char a = char_at(tok, text, 0), b = char_at(tok, text, a.n);
    bool may_lead = a.class != NUMBER && !is_newline(a.c);
    if (a.class == LETTER || (may_lead && b.class == LETTER))
        return run_end(tok, text, a.n, LETTER);                                      // 2
    if (a.class == NUMBER) return a.n;                                               // 3
    if (a.class == SPACE && !(a.c == ' ' && b.class == OTHER))
        return space_length(tok, text);                                              // 5-7
    for (end = run_end(tok, text, a.n, OTHER); end < text.n && is_newline(text.p[end]);) end++;
    return end;                                                                      // 4
}

typedef struct {             // text arrives in parts, some of which may hold added tokens
    const Tokenizer *tok;
    Ids *out;
    Buffer plain;            // the text since the last added token, not encoded yet
    struct Symbol *symbols;  // Part II only: see encode_piece
    size_t symbols_cap;
} Encoder;

// Part II: appends the text in form NFC; as it is, if an older tokenizer file has no data for that.
static void normalize(const Tokenizer *tok, Buffer *out, Bytes text);

// Part II: byte-pair encoding. Merges the pair with the highest score, of equal ones the leftmost,
// until no two neighbours of the piece make a token; then appends its tokens to enc->out.
static void encode_piece(Encoder *enc, Bytes piece);

// Encodes the plain text that has arrived. A byte makes at most one token: so all counts fit into
// an int. After Ctrl-C ids are missing, but forward stops as well.
static void encode_flush(Encoder *enc) {
    Buffer normal = {0};
    normalize(enc->tok, &normal, bytes_of(&enc->plain));
    if (normal.n + enc->out->n >= INT_MAX) die("text: too long, expected less than 2 GB");
    for (Bytes text = bytes_of(&normal); text.n && !interrupted;) {
        const size_t n = piece_length(enc->tok, text);
        encode_piece(enc, (Bytes){text.p, n});
        text = bytes_from(text, n);
    }
    free(normal.p);
    enc->plain.n = 0;
}

static void encode_token(Encoder *enc, int id) {
    encode_flush(enc);
    ids_add(enc->out, id);
}

// Adds plain text, which encode_flush will encode. An added token spelled out in it, such as
// <|im_end|>, stays plain text, as merging never makes an added token. So a user, whose text comes
// here, can't forge the chat format.
static void encode_plain(Encoder *enc, Bytes text) { buffer_add(&enc->plain, text); }

// Part II: returns the first added token at or after *at, the longest if several begin there, and
// sets *at to its offset. If there is none, returns -1, and *at is the end of the text.
static int added_next(const Tokenizer *tok, Bytes text, size_t *at);

// Adds text in which spelled-out added tokens are recognized and become single tokens.
static void encode_marked(Encoder *enc, Bytes text) {
    size_t at = 0, done = 0;
    for (int id; (id = added_next(enc->tok, text, &at)) >= 0; done = at) {
        encode_plain(enc, (Bytes){text.p + done, at - done});
        encode_token(enc, id);
        at += enc->tok->text[id].n;
    }
    encode_plain(enc, bytes_from(text, done));
}

static void encode_end(Encoder *enc) {
    encode_flush(enc);
    free(enc->plain.p);
    free(enc->symbols);
}

// Appends the ids of a text, in which the spelling of added tokens counts if `marked` is true.
static void encode_part(const Tokenizer *tok, Bytes text, bool marked, Ids *out) {
    Encoder enc = {.tok = tok, .out = out};
    if (marked) encode_marked(&enc, text);
    else encode_plain(&enc, text);
    encode_end(&enc);
}

// A raw text (in all modes but chat), as HF's tokenizer(text) encodes it
static void encode_raw(const Tokenizer *tok, Bytes text, Ids *out) {
    for (size_t i = 0; i < tok->head.n; i++) ids_add(out, tok->head.p[i]);
    encode_part(tok, text, true, out);
    for (size_t i = 0; i < tok->tail.n; i++) ids_add(out, tok->tail.p[i]);
}

// ------------------------------------------------------------------------------------------------
// The chat format. A conversation is a list of messages. A chat model was trained on conversations
// written in one form, which its checkpoint has as a program, the chat template. So the prompt of
// each turn is all messages in that form, up to where the model's answer begins, for example
//   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n
//   <|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n
// (without line breaks). The model goes on from there: perhaps with its thinking, <think>, what it
// considers, </think>, then with the answer, and <|im_end|>.
//
// export.py has turned the template into a ChatFormat. Each turn encodes the whole conversation
// anew; the beginning that the cache holds already does not run again. (Where a <think> block, even
// an empty one, preceded the last answer, the next turn leaves it out, as the template does. The
// tokens behind it then have other positions and see other tokens, so they run again.)

typedef struct {
    int role;     // SYSTEM (instructions for all of it), USER or ASSISTANT (the model)
    Ids ids;      // of an answer that the model drew: its tokens
    Buffer text;  // of any other message; if the option -x TEXT ended a drawn answer in the middle
                  // of a token, the part of the token that stands before TEXT
} Message;

typedef struct {
    Message *p;
    size_t n;
    size_t cap;  // p has room for so many
} Conversation;

// How many bytes of an answer are its thinking: those up to the last </think>, and the newlines
// after it
static size_t thinking_length(const ChatFormat *f, Bytes text) {
    size_t n = find_last(text, f->strip);
    while (n > 0 && n < text.n && f->trim.n && memchr(f->trim.p, text.p[n], f->trim.n)) n++;
    return n;
}

// Adds an answer of an earlier turn without its thinking: of the tokens "</think>" "\n\n" "Yes"
// "<tool_call>", the first 10 bytes are left out. (They may end inside a token.) The rest is
// encoded anew, as by the chat template: "Yes" as plain text, whose ids can differ from those that
// were drawn. For added tokens, such as <tool_call>, the drawn ids are needed: these stay tokens,
// while an answer that spells one out is plain text.
static void encode_answer(Encoder *enc, const ChatFormat *f, const Message *message) {
    const Ids *ids = &message->ids;
    const Bytes rest = bytes_of(&message->text);
    Buffer all = {0};
    for (size_t i = 0; i < ids->n; i++) buffer_add(&all, enc->tok->text[ids->p[i]]);
    buffer_add(&all, rest);
    size_t left = thinking_length(f, bytes_of(&all));  // bytes that are still to be left out
    for (size_t i = 0; i < ids->n; i++) {
        const int id = ids->p[i];
        const Bytes text = enc->tok->text[id];
        const size_t cut = min_size(left, text.n);
        left -= cut;
        if (cut == 0 && enc->tok->kind[id] & ADDED) encode_token(enc, id);
        else encode_plain(enc, bytes_from(text, cut));
    }
    encode_plain(enc, bytes_from(rest, left));
    free(all.p);
}

// The ids of a conversation, up to where the model's answer begins. Messages before number `first`
// are left out, except a system message: so a conversation that has grown longer than the context
// forgets its first turns.
static void render(const Tokenizer *tok, const Conversation *conversation, size_t first, bool think,
                   Ids *out) {
    const ChatFormat *f = &tok->chat;
    Encoder enc = {.tok = tok, .out = out};
    out->n = 0;
    encode_marked(&enc, f->start);
    if (conversation->n == 0 || conversation->p[0].role != SYSTEM)
        encode_marked(&enc, f->no_system);
    for (size_t i = 0; i < conversation->n; i++) {
        const Message *message = &conversation->p[i];
        if (i < first && message->role != SYSTEM) continue;
        encode_marked(&enc, f->open[message->role]);
        if (message->role == ASSISTANT) encode_answer(&enc, f, message);
        else encode_plain(&enc, bytes_of(&message->text));
        encode_marked(&enc, f->close[message->role]);
    }
    encode_marked(&enc, f->answer[think]);
    encode_end(&enc);
}

// ------------------------------------------------------------------------------------------------
// The sampler: repetition penalty, presence penalty (which HF lacks), temperature, top-k, top-p, in
// HF's order. (The likeliest token each time would make a dull text that repeats itself.) Top-k and
// top-p cut off the very many unlikely tokens: else one of them would be drawn now and then. Tokens
// are ordered by probability, of equal ones the lower id first. Nothing is sorted: each step is a
// loop over the vocabulary that compilers vectorize, so the time hardly depends on the
// distribution. A new field of Sampler needs a row in Part II's table of options as well.

typedef struct {
    float temperature;  // divides the logits: < 1 makes likely tokens still likelier; 0: the best
    float top_p;        // keep the smallest set that reaches this probability, the nucleus
    int top_k;          // keep the k most likely tokens, 0: all
    float presence;     // subtracted from the logits of tokens that are in the answer
    float repetition;   // makes tokens of the prompt and the answer less likely, 1: off
    bool *answered;     // (vocab_size) is in the answer
    bool *seen;         // (vocab_size) is in the prompt or the answer
    uint64_t rng;
} Sampler;

INLINE int32_t load_i32(const void *p) {  // the 4 bytes at any address p
    int32_t value;
    memcpy(&value, p, 4);
    return value;
}

// One of 2^53 numbers in [0, 1): splitmix64
static double random_next(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (double)((z ^ z >> 31) >> 11) / 9007199254740992.0;
}

// The sum of x (n) in double, as 16 interleaved sums: finite if and only if every x is
static double sum_double(const float *x, int n) {
    double sums[16] = {0}, sum = 0;
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        for (int j = 0; j < 16; j++) sums[j] += x[i + j];
    }
    for (; i < n; i++) sums[i % 16] += x[i];
    for (int j = 0; j < 16; j++) sum += sums[j];
    return sum;
}

static int argmax(const float *x, int n) {
    int best = 0;
    for (float max = max_of(x, n); x[best] != max && best < n - 1;) best++;
    return best;
}

// Replaces logits (n) by exp((logit - max) / temperature): probabilities that are not normalized,
// of which the largest is 1
static void likelihoods(float *logits, int n, float max, float temperature) {
    for (int i = 0; i < n; i++) logits[i] = fast_exp((logits[i] - max) / temperature);
}

// Sets p of token id and of all less likely ones to 0. (p >= 0: bits have the order of the floats.)
static void keep_likelier(float *p, int n, int id) {
    const int32_t bits = load_i32(p + id);
    for (int i = 0; i < id; i++) p[i] = load_i32(p + i) >= bits ? p[i] : 0;
    for (int i = id; i < n; i++) p[i] = load_i32(p + i) > bits ? p[i] : 0;
}

// Sets all p but the k largest to 0. Finds a threshold that k values reach (are >= it), or more if
// several are equal: bit by bit, from the highest on, a bit is set if k or more still reach it.
static void keep_top_k(float *p, int n, int k) {
    int32_t threshold = 0;
    int kept = n;  // so many values reach it
    for (int32_t bit = 1 << 30; kept > k && bit > 0; bit /= 2) {
        int count = 0;
        for (int i = 0; i < n; i++) count += load_i32(p + i) >= (threshold | bit);
        if (count < k) continue;
        threshold |= bit;
        kept = count;
    }
    for (int i = 0; i < n; i++) p[i] = load_i32(p + i) >= threshold ? p[i] : 0;
    for (int i = n - 1; kept > k; i--) {  // of equal ones the lowest ids stay
        if (load_i32(p + i) != threshold) continue;
        p[i] = 0;
        kept--;
    }
}

// The lowest id at which the running sum of p (n) exceeds `target`, or n
static int token_at(const float *p, int n, double target) {
    enum { STEP = 1024 };
    int i = 0;
    for (double sum; i + STEP <= n && target >= (sum = sum_double(p + i, STEP)); i += STEP)
        target -= sum;
    while (i < n && (target -= p[i]) >= 0) i++;
    return i;
}

// The repetition penalty (HF RepetitionPenaltyLogitsProcessor), then the presence penalty
static void penalize(const Sampler *sampler, float *logits, int n) {
    const float repetition = sampler->repetition, presence = sampler->presence;
    for (int i = 0; i < n && repetition != 1; i++) {
        float lower = logits[i] < 0 ? logits[i] * repetition : logits[i] / repetition;
        if (sampler->seen[i]) logits[i] = lower;
    }
    for (int i = 0; i < n && presence != 0; i++) logits[i] -= sampler->answered[i] ? presence : 0;
}

// Draws the next token by its logits (n), which are overwritten; -1 if they are not finite. A token
// is in the nucleus if all likelier ones sum to less than top_p (> 0) times the sum of all: of p =
// 0.5, 0.3 and 0.2 with top_p = 0.6, the first two are. Drawing from it needs no sorting. Draw from
// all tokens: the third, say. The likelier ones sum to 0.8, so neither it nor a less likely token
// is in the nucleus: their p become 0. Draw again, until the drawn token is in it. As no draw
// leaves out a token of the nucleus, each has its part of the nucleus as its chance.
static int sample(Sampler *sampler, float *logits, int n) {
    penalize(sampler, logits, n);
    if (!isfinite(sum_double(logits, n))) return -1;
    if (sampler->temperature == 0) return argmax(logits, n);
    float *p = logits;
    likelihoods(p, n, max_of(logits, n), sampler->temperature);
    if (sampler->top_k > 0 && sampler->top_k < n) keep_top_k(p, n, sampler->top_k);
    double sum = sum_double(p, n), nucleus = sampler->top_p * sum;
    for (;;) {
        int id = token_at(p, n, random_next(&sampler->rng) * sum);
        if (id == n) continue;  // a rounding error at the end of the sum
        keep_likelier(p, n, id);
        sum = sum_double(p, n);
        if (sum < nucleus) return id;
    }
}

// log(sum(exp(logits))), logits (n), which are overwritten. A token's logit less this is the
// logarithm of its probability.
static double log_sum_exp(float *logits, int n) {
    const float max = max_of(logits, n);
    likelihoods(logits, n, max, 1);
    return log(sum_double(logits, n)) + max;
}

typedef struct Writer Writer;

// Writes a token's text. Returns false if the option -x TEXT ends the answer here: as soon as TEXT
// comes, nothing from it on is written.
static bool writer_token(Writer *out, const Tokenizer *tok, int id);

// ------------------------------------------------------------------------------------------------
// The main loop. A text is its ids, of which the first `run` have run. A pass runs ids that have
// not run, of all texts, as many as fit into a batch. Once all ids of a text have run, the logits
// of the last one say what may follow: an id is drawn, written and appended, and runs in the next
// pass. So the ids of a prompt and those of an answer are treated alike. A line of a list is a
// text, and so is a turn of a conversation. Of its ids, only those run that the cache does not hold
// already from the turn before. In short, an answer is made thus (respond, in Part II):
//
//   render(tok, conversation, 0, think, &ids);  // the prompt; of a raw text by encode_raw
//   Text *t = add_text(e, ids.p, ids.n);        // it waits until there is room in the cache
//   while (t->ending == GOES_ON && run_pass(e)) draw_all(e);
//
// Some texts are not continued but scored: how likely is each id, from number `known` on? The
// logits of the id before it tell. A perplexity, exp(mean of -log(probability)), begins with
// known = 1, as nothing is before the first id. With the option -o the user gives several answers,
// to be compared: the prompt's last logits score the first id of each (score_choices); then each
// answer of several ids runs as a text, prompt and answer, with known = prompt + 1. A text from
// which ids are drawn has known = all ids.

enum { PLACES = 32 };  // texts that run together

typedef enum {
    GOES_ON, TURN_ENDED, LIMIT_REACHED, CONTEXT_ENDED, INTERRUPTED,
    FAILED             // the logits, or an embedding, are not finite
} Ending;

struct Text {
    Ids ids;           // its tokens, those of the prompt first
    size_t run;        // so many have run: their keys and values are in the KV cache
    int *blocks;       // its blocks of the cache: position pos is in blocks[pos / block_len]
    size_t known;      // ids from this number on are still to be scored, or to be drawn
    int rows;          // ids that run in this pass, without guesses
    int first;         // its first row of logits
    int guesses;       // so many behind ids.n are guessed, and run, too (Part II: Drafts)
    double *score;     // where the sum of -log(probability) of its scored ids goes
    Ending ending;
    Sampler sampler;
    Writer *writer;    // where the answer goes
    size_t prompt;     // tokens of the prompt
    size_t chooses;    // not 0: once so many ids have run, given answers are scored
    // Part II only:
    struct Request *request;
    size_t cached;     // tokens of the prompt that were there when it began
    size_t before;     // so many had run when it had to wait
    int n_blocks;      // that it has
    int drafted;       // ids that were guessed before this pass
    int thought;       // tokens that were drawn since <think>
    bool closed;       // its thinking was too long and was ended by -r N
    Buffer out;        // the answer of a text in a list, or an embedding
};

typedef struct {
    Model model;
    Tokenizer tokenizer;
    Mode mode;         // -m, or what the model is made for
    int max_new;       // the maximum number of tokens in an answer, -1: no limit
    Text *active[PLACES + 1];  // first the n_running texts that run
    int n_running;
    int needed;        // rows of logits in this pass
    double *scores;    // (logit_rows) -log(probability) of the id after each row, if it is there
    size_t rows;       // tokens that ran so far
    // Part II only: see Many texts at once
    Text places[PLACES + 1];
    int n_active;      // texts that run or wait
    int n_places;      // the maximum number of these
    size_t cached;     // tokens of prompts that did not need to run
    size_t drawn;      // tokens of answers
    size_t again;      // that ran again, as their text had had to wait
    int *users;        // (State.blocks) how many texts have this block
    int n_unused;      // blocks that no text has
    int credit;        // what drafts may still cost
    bool thinks;       // the prompt opens the thinking
    bool may_think;    // it does, or the model may
    int budget;        // the maximum number of tokens of thinking (-r), INT_MAX: no limit
    Ids closing;       // what ends thinking that has reached it
    Ids blank;         // what follows </think> before given answers
    struct Choice *choices;  // given answers (-o)
    int n_choices;
    Ids longer;        // numbers of the choices that have several ids
    size_t longest;    // tokens of the longest one
} Engine;

// -m embed: makes the last row's x an embedding, a vector by which texts are compared. (Part II)
static void embed_text(const Engine *e, Text *t);

// Chooses the texts that run, n_running <= batch and <= logit_rows, and sees to it that the cache
// has room for their ids. Guesses ids where this may save a pass, as many as fit into it. (Part II)
static void schedule(Engine *e);

// Makes the rows of the next pass and returns how many they are. Each text that runs gets one at
// least, the first texts as many as fit. A row needs logits if the id after it is to be drawn or
// scored: so of a prompt's rows only the last does. A scored text's last id need not run.
static int make_rows(Engine *e) {
    const State *s = &e->model.state;
    int n = 0;
    e->needed = 0;
    for (int i = 0; i < e->n_running; i++) {
        Text *t = e->active[i];
        const size_t end = t->known < t->ids.n ? t->ids.n - 1 : t->ids.n + t->guesses;
        const int later = e->n_running - 1 - i;  // a row is kept for each text that follows
        t->first = e->needed;
        t->rows = 0;
        for (size_t pos = t->run; pos < end; pos++) {
            const bool needed = pos + 1 >= t->known;
            if (n + later == s->batch || e->needed + later == s->logit_rows) break;
            s->rows[n++] = (Row){t->ids.p[pos], (int)pos, t, needed};
            e->needed += needed;
            t->rows += pos < t->ids.n;  // a guess counts in draw
        }
    }
    return n;
}

// Runs the next rows of all texts. Returns false if no text runs, or after Ctrl-C.
static bool run_pass(Engine *e) {
    schedule(e);
    const int n = make_rows(e);
    if (n == 0 || !forward(&e->model, n)) return false;
    for (int i = 0; i < e->n_running; i++) e->active[i]->run += e->active[i]->rows;
    e->rows += n;
    return true;
}

static bool is_stop(const Tokenizer *tok, int id) {
    for (size_t i = 0; i < tok->stop.n; i++) {
        if (tok->stop.p[i] == id) return true;
    }
    return false;
}

// Appends an id to its text and writes it, unless it is a stop id. Returns how the answer ends, or
// GOES_ON.
static Ending append_id(const Engine *e, Text *t, int id) {
    Ids *ids = &t->ids;
    if (is_stop(&e->tokenizer, id)) return TURN_ENDED;
    ids_add(ids, id);
    t->known = ids->n;
    t->sampler.answered[id] = t->sampler.seen[id] = true;
    if (!writer_token(t->writer, &e->tokenizer, id)) return TURN_ENDED;
    if (ids->n - t->prompt == (size_t)e->max_new) return LIMIT_REACHED;  // -1 is never equal
    return ids->n <= (size_t)e->model.state.seq_len ? GOES_ON : CONTEXT_ENDED;  // room to run it
}

// append_id, and ids that the program itself puts behind the end of thinking (Part II)
static Ending take_drawn(const Engine *e, Text *t, int id);

// Scores the given answers of a text, all of whose ids have run, instead of drawing one. (Part II)
static void score_choices(const Engine *e, Text *t);

static float *logits_of(const Engine *e, int row) {
    return e->model.state.logits + (size_t)row * e->tokenizer.vocab_size;
}

// Draws the id that follows a text, all of whose ids have run. If an id was guessed there, its row
// has run, too; and if it is the one that is drawn, the row's logits give the id after it, and so
// on. If not, the drawn id takes the place of the guess, and later its keys and values replace
// those of the guess in the cache; schedule() forgets the guesses after it. So guesses save passes
// and change no id.
static void draw(const Engine *e, Text *t) {
    if (e->max_new == 0) t->ending = LIMIT_REACHED;
    for (int row = t->first; t->ending == GOES_ON && !interrupted; row++) {
        const size_t n = t->ids.n;
        const int guess = t->guesses > 0 ? t->ids.p[n] : -1;
        const int id = sample(&t->sampler, logits_of(e, row), e->tokenizer.vocab_size);
        t->ending = id < 0 ? FAILED : take_drawn(e, t, id);
        const bool alone = t->ids.n == n + 1;  // the program has put nothing behind it
        if (id != guess || !alone || t->ending != GOES_ON) break;
        t->guesses--;
        t->run++;
    }
}

// `run` ids have run, so ids known .. run have scores now: adds these, in their order.
static void add_scores(const Engine *e, Text *t) {
    for (int row = t->first; t->known <= t->run; t->known++) *t->score += e->scores[row++];
    if (!isfinite(*t->score)) t->ending = FAILED;
    else if (t->known == t->ids.n) t->ending = TURN_ENDED;
}

// logits[id], or what stands for the end of a given answer (Part II)
static double logit_of(const Tokenizer *tok, const float *logits, int id);

// scores[i] = -log(probability) of the id after row i, if it is there. (forward() has moved the
// rows that are needed to the front: row i has logits i.)
static void score_rows(void *arg, int begin, int end) {
    const Engine *e = arg;
    for (int i = begin; i < end; i++) {
        const Row *row = &e->model.state.rows[i];
        const Ids *ids = &row->text->ids;
        const size_t next = row->pos + 1;
        if (next >= ids->n) continue;
        const double logit = logit_of(&e->tokenizer, logits_of(e, i), ids->p[next]);
        e->scores[i] = log_sum_exp(logits_of(e, i), e->tokenizer.vocab_size) - logit;
    }
}

static void draw_texts(void *arg, int begin, int end) {
    const Engine *e = arg;
    for (int i = begin; i < end; i++) {
        Text *t = e->active[i];
        if (t->run < t->known) continue;
        if (e->mode == EMBED) embed_text(e, t);
        else if (t->known < t->ids.n) add_scores(e, t);
        else if (t->chooses) score_choices(e, t);
        else draw(e, t);
    }
}

// Calls job(arg, begin, end) for ranges of 0 .. count - 1, on all threads, and returns when all are
// done (Part III). A range begins at a multiple of `chunk`. Jobs themselves never call parallel().
typedef void (*Job)(void *arg, int begin, int end);
static void parallel(Job job, void *arg, int count, int chunk);

// After a pass: each text whose known ids have all run gets the next one, or its scores.
static void draw_all(Engine *e) {
    if (e->needed == 0) return;
    if (e->mode != EMBED) classify(&e->model, 0, e->needed);
    parallel(score_rows, e, e->needed, 1);
    parallel(draw_texts, e, e->n_running, 1);
}

// ================================================================================================
// PART II. THE PROGRAM
// ================================================================================================

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// What Part III provides to Part II, on POSIX and Windows
static void start_platform(int *argc, char ***argv);  // signals; Windows: UTF-8 and bytes
static void start_threads(int count);
static int cpu_count(void);                           // how many threads to start without -j
static const char *version(void);                     // a line, with the instruction set in use
static double now(void);                              // seconds since some fixed point
static bool is_terminal(int fd);
static unsigned file_mode(const char *path);          // st_mode, or 0 if there is no such file
static Bytes file_map(const char *path);              // the whole file, mapped read-only
static const char *file_read(Buffer *b, const char *path);  // adds it to b; NULL, or what is wrong
static void write_stdout(Bytes text);                 // all of it, whatever signals come
static const char *stdout_name = "stdout";            // for messages
static int file_open(const char *path, bool append);  // a descriptor to read, or -1; -: stdin
static bool file_lock(int fd, bool alone);            // false: another one has it (alone)
static double file_size(int fd);                      // of a regular file, else 0
static bool same_file(int a, int b);                  // two descriptors of one regular file
static double memory_size(void);                      // that this process may use, in bytes
static ssize_t read_more(int fd, Buffer *b);          // as read(), but waits if fd is nonblocking
static bool input_ready(int fd);                      // there is something to read, or the end
static bool stdin_has_data(void);                     // a pipe with data, or a file at its start
#ifdef __APPLE__
enum { TERMINAL_LINE = 1023 };                        // the most bytes of a line that is typed
#else
enum { TERMINAL_LINE = 4095 };
#endif
typedef enum { NOTHING, PART, LINE } Waiting;
static Waiting input_waits(void);                     // how much of a paste is still to be read

// Allocates all for passes of at most `batch` tokens, logit_rows rows of logits, and a cache
// of so many texts of up to seq_len positions (or as many as memory allows, but at least one)
static void state_init(Model *m, int seq_len, int batch, int logit_rows, int texts);
static void cache_copy(const Model *m, int to, int from);  // a block: all keys and values
static double position_size(const Config *c);              // bytes of all its keys and values
static int draft_rows(void);              // how many tokens run in about the time of one

// The seconds that the first Ctrl-C has to stop the answer, or -1: it ends the program
static volatile sig_atomic_t patience = -1;

// ------------------------------------------------------------------------------------------------
// Errors and memory

#ifdef __MINGW_PRINTF_FORMAT  // the dialect in which GCC checks formats
#define PRINTF __MINGW_PRINTF_FORMAT
#else
#define PRINTF printf
#endif

enum { EXIT_USAGE = 2, EXIT_INTERRUPT = 130 };

static bool quiet;  // -q: only errors on stderr

__attribute__((format(PRINTF, 1, 2))) static void report(const char *fmt, ...);

#define die_usage(...) (report(__VA_ARGS__), exit(EXIT_USAGE))  // an error in the command line
#define notice(...) (quiet ? (void)0 : report(__VA_ARGS__))     // worth knowing, but not an error

static atomic_flag dying = ATOMIC_FLAG_INIT;  // a thread reports the error that ends the program

// Several threads may get here at once: the first one reports, the others wait until the end.
static void die_memory(const char *what, double size) {
    while (atomic_flag_test_and_set(&dying)) {}
    die("memory: not enough for %s, expected %.0f MB", what, size / 1e6);
}

// Memory for `count` zeroed elements, aligned to 64 bytes, never freed. Untouched pages take none.
static void *alloc(size_t count, size_t size, const char *what) {
    char *p = count < (SIZE_MAX - 64) / size ? calloc(count * size + 64, 1) : NULL;
    if (!p) die_memory(what, count * (double)size);
    return p + (-(uintptr_t)p & 63);
}

// Returns p, reallocated if it has no room for `more` elements of `size` bytes after the first n.
static void *grow(void *p, size_t *cap, size_t n, size_t more, size_t size) {
    if (n + more <= *cap) return p;
    *cap = n + more > 2 * *cap ? n + more : 2 * *cap;
    p = realloc(p, *cap * size);
    if (!p) die_memory("text", *cap * (double)size);
    return p;
}

static void buffer_add(Buffer *b, Bytes text) {
    b->p = grow(b->p, &b->cap, b->n, text.n | 1, 1);  // | 1: p is not NULL after an empty text
    if (text.n) memcpy(b->p + b->n, text.p, text.n);
    b->n += text.n;
}

static void ids_add(Ids *ids, int id) {
    ids->p = grow(ids->p, &ids->cap, ids->n, 1, sizeof(int));
    ids->p[ids->n++] = id;
}

static bool bytes_equal(Bytes a, Bytes b) {
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

INLINE int max_int(int a, int b) { return a > b ? a : b; }

INLINE float as_float(uint32_t bits) {  // the float with these bits
    return (union { uint32_t bits; float value; }){bits}.value;
}

static size_t find_last(Bytes text, Bytes part) {
    for (size_t end = text.n; part.n && end >= part.n; end--) {
        if (memcmp(text.p + end - part.n, part.p, part.n) == 0) return end;
    }
    return 0;
}

// ------------------------------------------------------------------------------------------------
// The model file, model.bin: a header of 256 bytes, then the weights, all little-endian. It is the
// format of the older qwen3.c (github.com/adriancable/qwen3.c), whose files still load: there the
// header is zero from 0x30 on, so zero stands for what that format always has.
//
//   0x00  u32 magic 0x616A6331, u32 version 1
//   0x08  the numbers that take_header takes, u32 or float
//   0x70  with layer_bits 4, the 16 int8 levels, ascending; all else must be zero
//
// take_weights has the weights in their order, each for all layers before the next. Norms, routers,
// frequencies and biases are floats. A matrix (out, in) with 8 bits is all its int8 values row by
// row, then a float scale for each group_size consecutive values: scale = max|w| / 127,
// q = round(w / scale). With 4 bits it is all its pairs of nibbles (see weight_q), then a float of
// 16 bits for each group. (It has an even number of rows, so that the next matrix begins at a
// multiple of 4 bytes.) Embedding models, which need no classifier, count as shared.

typedef struct {  // takes a file apart from front to back, and never reads past its end
    const char *file;
    const char *part;  // what is being read, for messages
    Bytes rest;
    const char *hint;  // what to do if something is wrong
    bool or_zero;      // numbers may also be 0
} Cursor;

#define die_bad(in, name, expected, ...) \
    die("%s: bad %s, expected " expected, (in)->file, name, __VA_ARGS__)

static const void *take(Cursor *in, uint64_t size) {
    if (size > in->rest.n)
        die("%s: ends inside %s, expected %llu more bytes, found %zu; %s", in->file, in->part,
            (unsigned long long)size, in->rest.n, in->hint);
    const void *p = in->rest.p;
    in->rest = bytes_from(in->rest, size);
    return p;
}

static uint32_t take_u32(Cursor *in) { return (uint32_t)load_i32(take(in, 4)); }

static double take_number(Cursor *in, const char *name, bool is_float, double low, double high) {
    const uint32_t word = take_u32(in);
    const double value = is_float ? as_float(word) : (double)word;
    const char *zero = in->or_zero && low > 0 ? "0 or " : "";
    const int digits = is_float ? 6 : 10;
    if ((value >= low && value <= high) || (value == 0 && in->or_zero)) return value;
    if (low == high) die_bad(in, name, "%s%.0f, found %.0f; %s", zero, low, value, in->hint);
    die_bad(in, name, "%s%.*g to %.*g, found %.*g; %s", zero, digits, low, digits, high, digits,
            value, in->hint);
}

static void take_version(Cursor *in) {
    const uint32_t version = take_u32(in);
    if (version != 1)
        die_bad(in, "version", "1, found %u; was it made by a newer export.py?", version);
}

// Takes a number of this name into the struct that p points to.
#define TAKE(p, name, low, high) \
    p->name = take_number(in, #name, _Generic(p->name, float: true, default: false), low, high)

// Something else than a .bin file, which export.py makes of the first n bytes of `source`.
static void die_export(const char *file, const char *what, int n, const char *source) {
    die("%s: %s, expected a .bin file, which this makes: export.py %.*s", file, what, n, source);
}

static void check_magic(const char *file, uint32_t magic) {
    const char *path = strchr(file, '/') ? file : "./", *end = strrchr(file, '.');
    if (magic == 0x46554747) die_export(file, "a GGUF file", INT_MAX, file);
    if (end && !strcmp(end, ".safetensors"))
        die_export(file, "a part of a checkpoint", (int)(strrchr(path, '/') - path), path);
    if (magic != 0x616A6331)
        die("%s: not a qwen3.c model, expected a file made by export.py (magic 0x616a6331), "
            "found 0x%08x", file, magic);
}

static void take_zeros(Cursor *in, int at, int end) {  // offsets in the header
    for (; at < end; at += 4) {
        const uint32_t word = take_u32(in);
        if (word != 0)
            die("%s: unknown header field at 0x%02x, expected 0, found %u; was it made by a newer "
                "export.py?", in->file, at, word);
    }
}

static void take_header(Cursor *in, Config *c) {
    check_magic(in->file, take_u32(in));
    take_version(in);
    TAKE(c, dim, 1, 1 << 20);
    TAKE(c, hidden_dim, 1, 1 << 20);
    TAKE(c, n_layers, 1, 4096);
    TAKE(c, n_heads, 1, 4096);
    TAKE(c, n_kv_heads, 1, 4096);
    TAKE(c, vocab_size, 1, 1 << 30);
    TAKE(c, max_seq_len, 1, 1 << 30);
    TAKE(c, head_dim, 1, 4096);
    TAKE(c, shared_classifier, 0, 1);
    TAKE(c, group_size, 32, 256);
    in->or_zero = true;  // from 0x30 on
    TAKE(c, rope_theta, 1e-6f, 1e12f);
    TAKE(c, rms_norm_eps, FLT_MIN, 1e12f);
    TAKE(c, rope_scaling, 2, 2);
    TAKE(c, rope_factor, 0, FLT_MAX);
    take_zeros(in, 0x40, 0x54);
    TAKE(c, qkv_bias, 0, 1);
    TAKE(c, no_qk_norm, 0, 1);
    TAKE(c, n_experts, 0, 4096);
    TAKE(c, n_experts_used, 0, 4096);
    TAKE(c, no_topk_norm, 0, 1);
    TAKE(c, layer_bits, 4, 4);
    take_zeros(in, 0x6C, 0x70);
    if (c->layer_bits) memcpy(c->levels, take(in, sizeof(c->levels)), sizeof(c->levels));
    take_zeros(in, c->layer_bits ? 0x80 : 0x70, 0x100);
    if (c->rope_theta == 0) c->rope_theta = 1e6f;
    if (c->rms_norm_eps == 0) c->rms_norm_eps = 1e-6f;
    if (c->layer_bits == 0) c->layer_bits = 8;
    c->q_dim = c->n_heads * c->head_dim;
    c->kv_dim = c->n_kv_heads * c->head_dim;
}

// Checks what take_header did not.
static void check_config(const Cursor *in, const Config *c) {
    const int group = c->group_size, experts = c->n_experts, used = c->n_experts_used;
    const int64_t widest = max_int(c->dim, c->hidden_dim);
#define RULE(name, good, expected) \
    if (!(good)) die_bad(in, #name, expected ", found %.10g", (double)c->name)
    RULE(group_size, (group & (group - 1)) == 0, "32, 64, 128 or 256");
    RULE(dim, c->dim % group == 0, "a multiple of group_size");
    RULE(hidden_dim, c->hidden_dim % group == 0, "a multiple of group_size");
    RULE(head_dim, c->head_dim % 2 == 0, "an even number");
    RULE(n_kv_heads, c->n_heads % c->n_kv_heads == 0, "a divisor of n_heads");
    RULE(q_dim, c->q_dim % group == 0, "n_heads * head_dim to be a multiple of group_size");
    RULE(rope_factor, !c->rope_factor == !c->rope_scaling, "> 0 with rope_scaling, else 0");
    RULE(n_experts_used, used <= experts && !used == !experts, "1 to n_experts, or 0 without");
    RULE(n_experts, experts * widest <= 1 << 30, "at most 2^30 rows in all experts");
    RULE(no_topk_norm, c->no_topk_norm <= experts, "0 without experts");
    for (int i = 1; i < 16 && c->layer_bits == 4; i++) {
        RULE(levels[i], c->levels[i] > c->levels[i - 1], "ascending ones");
    }
}

static const float *take_floats(Cursor *in, uint64_t count, const char *what) {
    in->part = what;
    return count ? take(in, count * sizeof(float)) : NULL;
}

static Matrix take_matrix(Cursor *in, const Config *c, int rows, int cols, int bits,
                          const char *what) {
    const uint64_t count = (uint64_t)rows * cols, n_groups = count / c->group_size;
    in->part = what;
    const int8_t *bytes = take(in, count * bits / 8);
    const void *scales = take(in, n_groups * (bits == 8 ? sizeof(float) : sizeof(uint16_t)));
    return (Matrix){rows, cols, c->group_size, bits, bytes, scales, c->levels};
}

static void take_weights(Cursor *in, Config *c, Weights *w) {
    const int experts = max_int(c->n_experts, 1), bits = c->layer_bits;
    w->layers = alloc(c->n_layers, sizeof(Layer), "the layers");
#define EACH_LAYER for (int l = 0; l < c->n_layers; l++) w->layers[l]
    EACH_LAYER.rms_att = take_floats(in, c->dim, "rms_att");
    EACH_LAYER.rms_ffn = take_floats(in, c->dim, "rms_ffn");
    w->rms_final = take_floats(in, c->dim, "rms_final");
    EACH_LAYER.q_norm = take_floats(in, c->no_qk_norm ? 0 : c->head_dim, "q_norm");
    EACH_LAYER.k_norm = take_floats(in, c->no_qk_norm ? 0 : c->head_dim, "k_norm");
    EACH_LAYER.router = take_floats(in, c->n_experts * c->dim, "router");
    c->rope_freq = take_floats(in, c->rope_scaling ? c->head_dim / 2 : 0, "rope_freq");
    w->embedding = take_matrix(in, c, c->vocab_size, c->dim, 8, "the token embedding");
    EACH_LAYER.wq = take_matrix(in, c, c->q_dim, c->dim, bits, "wq");
    EACH_LAYER.wk = take_matrix(in, c, c->kv_dim, c->dim, bits, "wk");
    EACH_LAYER.wv = take_matrix(in, c, c->kv_dim, c->dim, bits, "wv");
    EACH_LAYER.wo = take_matrix(in, c, c->dim, c->q_dim, bits, "wo");
    EACH_LAYER.w1 = take_matrix(in, c, experts * c->hidden_dim, c->dim, bits, "w1");
    EACH_LAYER.w2 = take_matrix(in, c, experts * c->dim, c->hidden_dim, bits, "w2");
    EACH_LAYER.w3 = take_matrix(in, c, experts * c->hidden_dim, c->dim, bits, "w3");
    w->classifier = c->shared_classifier ? w->embedding
        : take_matrix(in, c, c->vocab_size, c->dim, 8, "the classifier");
    EACH_LAYER.bq = take_floats(in, c->qkv_bias ? c->q_dim : 0, "bq");
    EACH_LAYER.bk = take_floats(in, c->qkv_bias ? c->kv_dim : 0, "bk");
    EACH_LAYER.bv = take_floats(in, c->qkv_bias ? c->kv_dim : 0, "bv");
}

// Maps the file; all weights stay there. They are not looked through, which could take a minute,
// except where a number that is not finite would choose experts at random.
static void model_map(Model *m, const char *path) {
    Config *c = &m->config;
    const Bytes file = file_map(path);
    Cursor in = {path, "the header", file, "copy or export it again", false};
    take_header(&in, c);
    check_config(&in, c);
    take_weights(&in, c, &m->weights);
    if (in.rest.n != 0)
        die("%s: wrong size, expected %zu bytes, found %zu", path, file.n - in.rest.n, file.n);
    for (int j = 0; c->rope_freq && j < c->head_dim / 2; j++) {
        if (!(c->rope_freq[j] >= 0 && c->rope_freq[j] <= FLT_MAX))
            die_bad(&in, "rope_freq", "finite numbers from 0 on, found %g", c->rope_freq[j]);
    }
    for (int l = 0; l < c->n_layers && c->n_experts; l++) {
        if (!isfinite(sum_double(m->weights.layers[l].router, c->n_experts * c->dim)))
            die("%s: bad router of layer %d, expected finite numbers, found others", path, l);
    }
}

// ------------------------------------------------------------------------------------------------
// The tokenizer file, model.bin.tokenizer: u32 max_token_length (not used: some files count
// characters), u32 bos id (used where there is no <|endoftext|>), u32 eos id; then for each token
// from id 0 on
//
//   f32 score     higher scores merge first; -1e6 or less: never comes out of a merge
//   u32 length
//   u8 * length   the token's bytes
//
// A file of the older qwen3.c ends here, perhaps before vocab_size: the other tokens have no text.
// After exactly vocab_size tokens, export.py appends an extension: "q3tx", u32 version 1, u32
// length of the rest, then `sections`, each at most once: a tag of 4 bytes, u32 length, payload.
// The Unicode data is that of HF's tokenizers package, so that ids agree on every text.

// What a file may ask for, so that none takes all time or memory: bytes of a token, of an added
// token and of ChatFormat.strip; ids in head, tail and stop; characters that one decomposes into,
// and steps until then
enum { LONGEST = 1024, LONGEST_ADDED = 128, LONGEST_STRIP = 64, MOST_IDS = 1000, MOST_PARTS = 4,
       MOST_STEPS = 8 };

// Tables of characters: BAD_BYTE + byte stands for a byte that is not UTF-8.
enum { LAST_CHAR = 0x10FFFF, BAD_BYTE, N_CHARS = BAD_BYTE + 256, CODE_POINT = (1 << 21) - 1 };
// Tables.chars: a class; more than that if NFC may change the character or the one before
enum { CLASS_MASK = 3, NFC_ACTIVE = 4, CCC_SHIFT = 8 };

typedef struct Tables {
    uint32_t *table;       // (mask + 1) hash table of the tokens: id + 1, or 0 if free
    uint32_t mask;
    uint64_t secret;       // of the hash, odd: nobody can make a file whose tokens share slots
    size_t longest;        // the most bytes of a token
    bool added_start[256]; // the bytes that added tokens begin with
    bool added_length[LONGEST_ADDED + 1];  // the numbers of bytes that they have
    bool has_classes;      // the file has the classes of characters (older ones: ASCII's alone)
    uint16_t chars[N_CHARS];       // what each character is
    uint64_t decomposed[N_CHARS];  // canonical decompositions: first << 21 | second, or 0
    uint64_t composed[N_CHARS];    // and back, sorted, for those that NFC composes again:
                                   // first << 42 | second << 21 | what the two become
    size_t n_composed;     // 0: the file has no such data, and a text stays as it is
} Tables;

static const float ADDED_SCORE = -1e6f;  // tokens that come out of merges have a higher score

static Bytes take_text(Cursor *in) {
    const uint32_t n = take_u32(in);
    return (Bytes){take(in, n), n};
}

static uint32_t take_int(Cursor *in, uint32_t low, uint32_t high) {
    return (uint32_t)take_number(in, in->part, false, low, high);
}

static void take_ids(Cursor *in, const Tokenizer *tok, Ids *ids) {
    if (in->rest.n > 4 * MOST_IDS)
        die_bad(in, in->part, "at most %d ids, found %zu", MOST_IDS, in->rest.n / 4);
    while (in->rest.n) ids_add(ids, take_int(in, 0, tok->vocab_size - 1));
}

// adde: u32 id, u32 special (not written in answers) for each added token, by id
static void take_added(Cursor *in, Tokenizer *tok) {
    if (in->rest.n) memset(tok->kind, 0, tok->vocab_size);
    for (uint32_t id, next = 0; in->rest.n; next = id + 1) {
        id = take_int(in, next, tok->vocab_size - 1);
        if (tok->text[id].n == 0 || tok->text[id].n > LONGEST_ADDED)
            die_bad(in, in->part, "tokens of 1 to %d bytes, found %zu in token %u", LONGEST_ADDED,
                    tok->text[id].n, id);
        tok->kind[id] = take_int(in, 0, 1) ? ADDED | SPECIAL : ADDED;
    }
}

// Ranges of characters, ascending: u32 first, u32 last, u32 value, 1 .. highest
static void take_ranges(Cursor *in, Tokenizer *tok, uint32_t highest, int shift) {
    for (uint32_t next = 0; in->rest.n;) {
        const uint32_t first = take_int(in, next, LAST_CHAR);
        const uint32_t last = take_int(in, first, LAST_CHAR), value = take_int(in, 1, highest);
        for (next = first; next <= last; next++) tok->tables->chars[next] |= value << shift;
    }
}

static void take_decompositions(Cursor *in, Tokenizer *tok);  // deco: see Unicode
static void take_classes(Cursor *in, Tokenizer *tok) { take_ranges(in, tok, SPACE, 0); }
static void take_ccc(Cursor *in, Tokenizer *tok) { take_ranges(in, tok, 255, CCC_SHIFT); }
static void take_head(Cursor *in, Tokenizer *tok) { take_ids(in, tok, &tok->head); }
static void take_tail(Cursor *in, Tokenizer *tok) { take_ids(in, tok, &tok->tail); }
static void take_stop(Cursor *in, Tokenizer *tok) { take_ids(in, tok, &tok->stop); }
static void take_penalty(Cursor *in, Tokenizer *tok) { TAKE(tok, repetition, 1e-6f, 1e12f); }
static void take_mode(Cursor *in, Tokenizer *tok) { TAKE(tok, mode, 0, N_MODES - 1); }

static void take_sampling(Cursor *in, Tokenizer *tok) {
    TAKE(tok, temperature, 0, 1e6f);
    TAKE(tok, top_p, 1e-45f, 1);
    TAKE(tok, top_k, 0, INT_MAX);
}

// The texts that export.py finds by rendering the chat template
static void take_chat(Cursor *in, Tokenizer *tok) {
    ChatFormat *f = &tok->chat;
    Bytes *texts[] = {&f->start, &f->no_system, &f->open[SYSTEM], &f->close[SYSTEM],
                      &f->open[USER], &f->close[USER], &f->open[ASSISTANT], &f->close[ASSISTANT],
                      &f->answer[0], &f->answer[1], &f->strip, &f->trim};
    for (size_t i = 0; i < sizeof(texts) / sizeof(*texts); i++) *texts[i] = take_text(in);
    if (f->strip.n > LONGEST_STRIP)
        die_bad(in, in->part, "strip of at most %d bytes, found %zu", LONGEST_STRIP, f->strip.n);
}

static const struct { char tag[5]; void (*take)(Cursor *in, Tokenizer *tok); } sections[] = {
    {"adde", take_added}, {"clas", take_classes}, {"ccc ", take_ccc}, {"deco", take_decompositions},
    {"head", take_head}, {"tail", take_tail}, {"stop", take_stop}, {"samp", take_sampling},
    {"repe", take_penalty}, {"mode", take_mode}, {"chat", take_chat}};

static void take_extension(Cursor *in, Tokenizer *tok) {
    enum { N = sizeof(sections) / sizeof(*sections) };
    in->part = "the extension";
    in->hint = "copy or export it again";
    if (memcmp(take(in, 4), "q3tx", 4) != 0)
        die("%s: wrong bytes after token %d, expected q3tx or the end; is it another model's?",
            in->file, tok->vocab_size - 1);
    take_version(in);
    take_number(in, "extension length", false, in->rest.n - 4.0, in->rest.n - 4.0);
    for (bool seen[N] = {false}; in->rest.n;) {
        const char *tag = take(in, 4);
        int i = 0;
        while (i < N && memcmp(tag, sections[i].tag, 4) != 0) i++;
        if (i == N)
            die("%s: unknown section \"%.4s\"; was it made by a newer export.py?", in->file, tag);
        if (seen[i]) die("%s: section %s is there twice", in->file, sections[i].tag);
        seen[i] = true;
        Cursor section = {in->file, sections[i].tag, take_text(in), in->hint, false};
        sections[i].take(&section, tok);
        if (section.rest.n)
            die("%s: section %s has %zu bytes too many", in->file, section.part, section.rest.n);
    }
}

// The slot of the hash table that holds the token with these bytes, or is free for it: an added and
// an ordinary one may have the same bytes. FNV-1a with a secret factor; the slot comes from both
// halves of a last product (as in wyhash).
static uint32_t *token_slot(const Tokenizer *tok, Bytes text, bool added) {
    uint64_t hash = tok->tables->secret;
    for (size_t i = 0; i < text.n; i++) hash = (hash ^ text.p[i]) * tok->tables->secret;
    __uint128_t folded = (__uint128_t)hash * tok->tables->secret;
    uint32_t slot = (uint32_t)(folded ^ folded >> 64) & tok->tables->mask;
    for (; tok->tables->table[slot]; slot = (slot + 1) & tok->tables->mask) {
        const uint32_t id = tok->tables->table[slot] - 1;
        if (bytes_equal(tok->text[id], text) && !(tok->kind[id] & ADDED) == !added) break;
    }
    return &tok->tables->table[slot];
}

// The added token, or the ordinary one, with exactly these bytes, or -1
static int token_find(const Tokenizer *tok, Bytes text, bool added) {
    return (int)*token_slot(tok, text, added) - 1;
}

static int added_next(const Tokenizer *tok, Bytes text, size_t *at) {
    for (; *at < text.n && !interrupted; ++*at) {
        if (!tok->tables->added_start[text.p[*at]]) continue;
        for (size_t n = min_size(LONGEST_ADDED, text.n - *at); n > 0; n--) {
            if (!tok->tables->added_length[n]) continue;
            const int id = token_find(tok, (Bytes){text.p + *at, n}, true);
            if (id >= 0) return id;
        }
    }
    return -1;
}

static void index_tokens(Tokenizer *tok, const char *file) {
    tok->tables->secret = (uint64_t)(now() * 1e9) * 0x9E3779B97F4A7C15u | 1;  // new in each run
    tok->tables->mask = UINT32_MAX >> __builtin_clz(2 * (uint32_t)tok->vocab_size | 255);
    tok->tables->table = alloc((size_t)tok->tables->mask + 1, sizeof(uint32_t), "the tokenizer");
    for (int id = 0; id < tok->vocab_size; id++) {
        const Bytes s = tok->text[id];
        const bool added = tok->kind[id] & ADDED;
        uint32_t *slot = token_slot(tok, s, added);
        if (*slot == 0 && (added || s.n == 1 || tok->score[id] > ADDED_SCORE)) *slot = id + 1;
        if (added) tok->tables->added_start[s.p[0]] = true;
        if (added) tok->tables->added_length[s.n] = true;
    }
    for (int i = 0; i < 256; i++) {
        if (token_find(tok, (Bytes){(uint8_t[]){i}, 1}, false) < 0)
            die("%s: no token for byte 0x%02x, expected all 256; is it another model's?", file, i);
    }
}

// ChatML, which all Qwen models speak: for files without a chat format. Where the vocabulary has
// <think> and </think>, an empty block turns thinking off.
static ChatFormat chatml(bool has_think) {
    Bytes end = bytes("<|im_end|>\n"), answer = bytes("<|im_start|>assistant\n");
    Bytes no_think = bytes("<|im_start|>assistant\n<think>\n\n</think>\n\n");
    return (ChatFormat){
        .open = {bytes("<|im_start|>system\n"), bytes("<|im_start|>user\n"), answer},
        .close = {end, end, end},
        .answer = {has_think ? no_think : answer, answer},
        .strip = bytes("</think>"), .trim = bytes("\n")};
}

static void tokenizer_load(Tokenizer *tok, const char *file, int vocab_size) {
    Cursor in = {file, "the header", file_map(file), "is it another model's, or cut?", false};
    *tok = (Tokenizer){.vocab_size = vocab_size, .temperature = 0.6f, .top_p = 0.95f, .top_k = 20,
                       .repetition = 1};
    tok->text = alloc(vocab_size, sizeof(Bytes), "the tokenizer");
    tok->score = alloc(vocab_size, sizeof(float), "the tokenizer");
    tok->kind = alloc(vocab_size, 1, "the tokenizer");
    tok->tables = alloc(1, sizeof(Tables), "the tokenizer");
    take_u32(&in);  // max_token_length
    const int bos = take_number(&in, "bos id", false, 0, vocab_size - 1);
    const int eos = take_number(&in, "eos id", false, 0, vocab_size - 1);
    in.part = "the tokens";
    for (int id = 0; id < vocab_size && in.rest.n; id++) {
        tok->score[id] = as_float(take_u32(&in));
        if (isnan(tok->score[id])) die("%s: bad score of token %d, expected a number", file, id);
        const Bytes s = tok->text[id] = take_text(&in);
        if (s.n > LONGEST)
            die("%s: bad length of token %d, expected at most %d bytes, found %zu; %s", file, id,
                LONGEST, s.n, in.hint);
        if (s.n > tok->tables->longest) tok->tables->longest = s.n;
        if (tok->score[id] > ADDED_SCORE || s.n < 2 || s.n > LONGEST_ADDED) continue;
        const bool special = s.n > 4 && !memcmp(s.p, "<|", 2) && !memcmp(s.p + s.n - 2, "|>", 2);
        tok->kind[id] = special ? ADDED | SPECIAL : ADDED;  // unless the file says which are
    }
    if (in.rest.n) take_extension(&in, tok);
    tok->tables->has_classes = tok->tables->chars['a'] & CLASS_MASK;  // else something like them
    for (uint32_t c = 0; c < BAD_BYTE && !tok->tables->has_classes; c++) {
        const bool letter = c >= 128 || isalpha(c);
        tok->tables->chars[c] |= letter ? LETTER : isspace(c) ? SPACE : isdigit(c) ? NUMBER : OTHER;
    }
    index_tokens(tok, file);
    tok->think = token_find(tok, bytes("<think>"), true);
    tok->end_think = token_find(tok, bytes("</think>"), true);
    tok->end_of_text = token_find(tok, bytes("<|endoftext|>"), true);
    if (tok->end_of_text < 0) tok->end_of_text = bos;
    if (!tok->chat.start.p) tok->chat = chatml(tok->think >= 0);
    if (tok->stop.n == 0) {
        ids_add(&tok->stop, eos);
        ids_add(&tok->stop, tok->end_of_text);
        ids_add(&tok->stop, token_find(tok, bytes("<|im_end|>"), true));
    }
    const Ids stop = tok->stop;  // each once, as given answers add up the probabilities of all
    tok->stop.n = 0;
    for (size_t i = 0; i < stop.n; i++) {
        if (stop.p[i] >= 0 && !is_stop(tok, stop.p[i])) ids_add(&tok->stop, stop.p[i]);
    }
}

// ------------------------------------------------------------------------------------------------
// Merging the tokens of a piece

// A token of a piece while it merges, known by where its bytes begin. The array of a piece's n
// symbols also holds a tree that says which of them merges next: leaf n + i is a number, the larger
// the earlier symbol i merges with the next one, or 0 if they make no token; node i < n is the
// larger of nodes 2 i and 2 i + 1. So node 1 is the largest of all.
typedef struct Symbol {
    uint32_t prev;  // where the one before it begins
    uint32_t next;  // where the one after it begins; n at the end, or once prev took it
    uint64_t node;
} Symbol;

// Finds what the symbol at `begin` makes with the next one, and updates the tree above it.
static void enter_symbol(Encoder *enc, Bytes piece, uint32_t begin) {
    Symbol *s = enc->symbols;
    const uint32_t n = (uint32_t)piece.n, next = s[begin].next;
    const int id = next == n ? -1
        : token_find(enc->tok, (Bytes){piece.p + begin, s[next].next - begin}, false);
    const float score = id < 0 ? 0 : enc->tok->score[id] + 0.0f;  // + 0: never -0
    const uint32_t bits = (uint32_t)load_i32(&score);
    const uint32_t order = bits ^ (bits >> 31 ? UINT32_MAX : 0x80000000);  // grows with the score
    s[n + begin].node = id < 0 ? 0 : (uint64_t)order << 32 | (n - begin);
    for (uint32_t i = n + begin; i > 1; i /= 2) {
        s[i / 2].node = s[i].node > s[i ^ 1].node ? s[i].node : s[i ^ 1].node;
    }
}

static void encode_piece(Encoder *enc, Bytes piece) {
    const uint32_t n = (uint32_t)piece.n;
    Symbol *s = enc->symbols = grow(enc->symbols, &enc->symbols_cap, 0, 2 * piece.n, sizeof(*s));
    for (uint32_t i = 0; i < 2 * n; i++) s[i] = (Symbol){i - 1, i + 1, 0};
    for (uint32_t i = 0; i < n && !interrupted; i++) enter_symbol(enc, piece, i);
    while (s[1].node && !interrupted) {
        const uint32_t i = n - (uint32_t)s[1].node, merged = s[i].next, next = s[merged].next;
        s[i].next = next;
        s[merged].next = n;
        if (next < n) s[next].prev = i;
        if (i > 0) enter_symbol(enc, piece, s[i].prev);
        enter_symbol(enc, piece, i);
        enter_symbol(enc, piece, merged);
    }
    for (uint32_t i = 0; i < n; i = s[i].next) {
        ids_add(enc->out, token_find(enc->tok, (Bytes){piece.p + i, s[i].next - i}, false));
    }
}

// ------------------------------------------------------------------------------------------------
// Unicode: UTF-8, and normalization form C (NFC; Unicode Standard Annex 15)

// The code point at offset `at` and its n bytes (RFC 3629: neither overlong forms nor surrogates)
static Char code_point_at(Bytes text, size_t at) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};  // of characters of n bytes
    const uint8_t *p = text.p + at;
    const int n = p[0] < 0xC0 ? 1 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    uint32_t c = n == 1 ? p[0] : p[0] & (0xFF >> n);
    int i = 1;
    while (i < n && at + i < text.n && (p[i] & 0xC0) == 0x80) c = c << 6 | (p[i++] & 0x3F);
    const bool stray = i < n || (n == 1 && c >= 0x80);
    if (stray || c < least[n] || c >= BAD_BYTE || (c >= 0xD800 && c < 0xE000))
        return (Char){.c = BAD_BYTE + p[0], .n = 1};
    return (Char){.c = c, .n = n};
}

static Char char_at(const Tokenizer *tok, Bytes text, size_t at) {
    if (at >= text.n) return (Char){0, 0, END, false};
    const Char c = code_point_at(text, at);
    const uint16_t kind = tok->tables->chars[c.c];
    return (Char){c.c, c.n, kind & CLASS_MASK, kind > CLASS_MASK};
}

// Appends c as UTF-8; a BAD_BYTE as its byte.
static void add_char(Buffer *b, uint32_t c) {
    int n = c < 0x80 || c >= BAD_BYTE ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    uint8_t u[4] = {c >= BAD_BYTE ? c - BAD_BYTE : c};
    for (int i = n - 1; i > 0; i--, c >>= 6) u[i] = 0x80 | (c & 0x3F);
    if (n > 1) u[0] = 0xF0 << (4 - n) | c;
    buffer_add(b, (Bytes){u, n});
}

typedef struct {  // characters to be put in order
    uint64_t *p;  // combining class (ccc) << 56 | place << 21 | code point
    size_t n;
    size_t cap;  // p has room for so many
} Marks;

// Compares what stands above a code point.
static int compare_keys(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a >> 21, y = *(const uint64_t *)b >> 21;
    return (x > y) - (x < y);
}

// Appends the full canonical decomposition of c. Returns false if `steps` do not reach its end.
static bool decompose(const Tokenizer *tok, Marks *out, uint32_t c, int steps) {
    const uint64_t parts = tok->tables->decomposed[c], second = parts & CODE_POINT;
    if (parts)
        return steps > 0 && decompose(tok, out, parts >> 21, steps - 1)
            && (second == 0 || decompose(tok, out, second, steps - 1));
    const uint64_t ccc = tok->tables->chars[c] >> CCC_SHIFT;
    out->p = grow(out->p, &out->cap, out->n, 1, sizeof(uint64_t));
    out->p[out->n] = ccc << 56 | out->n << 21 | c;
    out->n++;
    return true;
}

// c decomposes into `first` and `second`; if `second` is 0, c is just another code for `first`. If
// the pair composes again, NFC leaves c alone, and only a text with `second` needs work; otherwise
// every c must be replaced.
static void add_decomposition(Tokenizer *tok, uint32_t c, uint32_t first, uint32_t second,
                              bool composes) {
    const uint64_t parts = (uint64_t)first << 21 | second;
    tok->tables->decomposed[c] = parts;
    if (composes) tok->tables->composed[tok->tables->n_composed++] = parts << 21 | c;
    tok->tables->chars[composes ? second : c] |= NFC_ACTIVE;
}

// deco: canonical decompositions, u32 character, u32 first, u32 second or 0, u32 composes, by
// character. Those of Hangul syllables (a lead, a vowel and perhaps a tail) are not there: they
// follow from their numbers (Unicode Standard, section 3.12).
static void take_decompositions(Cursor *in, Tokenizer *tok) {
    enum { FIRST_SYLLABLE = 0xAC00, SYLLABLES = 19 * 21 * 28 };
    if (in->rest.n == 0) return;
    for (uint32_t c, next = 0; in->rest.n; next = c + 1) {
        c = take_int(in, next, LAST_CHAR);
        const uint32_t first = take_int(in, 0, LAST_CHAR), second = take_int(in, 0, LAST_CHAR);
        add_decomposition(tok, c, first, second, take_int(in, 0, 1));
        if (c - FIRST_SYLLABLE < SYLLABLES) die_bad(in, in->part, "no Hangul, found %u", c);
    }
    for (uint32_t i = 0; i < SYLLABLES; i++) {
        const uint32_t syllable = FIRST_SYLLABLE + i, tail = i % 28;
        if (tail) add_decomposition(tok, syllable, syllable - tail, 0x11A7 + tail, true);
        else add_decomposition(tok, syllable, 0x1100 + i / 28 / 21, 0x1161 + i / 28 % 21, true);
    }
    qsort(tok->tables->composed, tok->tables->n_composed, sizeof(uint64_t), compare_keys);
    Marks parts = {0};
    for (uint32_t c = 0; c <= LAST_CHAR; c++) {
        if (!tok->tables->decomposed[c]) continue;
        parts.n = 0;
        if (!decompose(tok, &parts, c, MOST_STEPS) || parts.n > MOST_PARTS)
            die_bad(in, in->part, "at most %d characters of each, found more of U+%04X",
                    MOST_PARTS, c);
    }
    free(parts.p);
}

// Sorts each run of marks (ccc > 0) by ccc, stably. Then each character composes with the last
// starter (ccc 0) before it, unless a character between the two has the same ccc or a higher one.
static void order_and_compose(const Tokenizer *tok, Marks *marks) {
    const Tables *tables = tok->tables;
    for (size_t i = 0, stop; i < marks->n; i = stop + 1) {
        for (stop = i; stop < marks->n && marks->p[stop] >> 56; stop++) {}
        qsort(marks->p + i, stop - i, sizeof(uint64_t), compare_keys);
    }
    uint64_t none = CODE_POINT, *starter = &none, *out = marks->p;  // no pair begins with `none`
    uint64_t last = 0;  // ccc of the character before, 0 if that is the starter
    for (size_t i = 0; i < marks->n; i++) {
        const uint64_t mark = marks->p[i], ccc = mark >> 56;
        const uint64_t pair = (*starter & CODE_POINT) << 42 | (mark & CODE_POINT) << 21;
        const uint64_t *composed = last && last >= ccc ? NULL
            : bsearch(&pair, tables->composed, tables->n_composed, sizeof(pair), compare_keys);
        if (composed) {
            *starter = *composed & CODE_POINT;
        } else {
            if (ccc == 0) starter = out;
            last = ccc;
            *out++ = mark;
        }
    }
    marks->n = out - marks->p;
}

// Appends NFC(text). Inactive characters are copied, but for the last one before a run of active
// characters (or the end), which is normalized with these, as it may compose with them.
static void normalize(const Tokenizer *tok, Buffer *out, Bytes text) {
    Marks chars = {0};
    Char c;
    if (tok->tables->n_composed == 0) {
        buffer_add(out, text);
        return;
    }
    for (size_t at = 0, run, end = 0; at < text.n && !interrupted; at = end) {
        for (run = at; (c = char_at(tok, text, end)).n && !c.active; end += c.n) run = end;
        buffer_add(out, (Bytes){text.p + at, run - at});
        chars.n = 0;
        for (end = run; (c = char_at(tok, text, end)).n && (end == run || c.active); end += c.n) {
            decompose(tok, &chars, c.c, MOST_STEPS);
        }
        order_and_compose(tok, &chars);
        for (size_t i = 0; i < chars.n; i++) add_char(out, chars.p[i] & CODE_POINT);
    }
    free(chars.p);
}

// ------------------------------------------------------------------------------------------------
// Many texts at once. To decode a token, a CPU reads all weights; they serve a token of each of 32
// texts just as well. So texts run together, and come and go from pass to pass (continuous
// batching: Orca, OSDI 2022). No row sees another text, and a batch gives the same bits as single
// tokens: each answer is the one that its text gets alone. A conversation has one text at a time.
//
// The cache is a pool of blocks, which a text takes as it grows (a paged KV cache: vLLM, arXiv
// 2309.06180): it holds many texts that could become long, but mostly do not. A text that begins
// like another shares its blocks (prefix sharing): each block counts its users. The block in which
// the two begin to differ is copied. A conversation's turn begins like the last one, texts of a
// list often have the same instruction. A text that does not run keeps its blocks until they or its
// place are needed: so texts of short answers share, too. When no block is left, the youngest text
// has to wait, and later runs again up to the last id that it drew (preemption by recomputation).
//
//   active:  0            n_running         n_active               n_places
//            | run        | wait to run     | free                        |
//            | first come ...     last come | ended last ... ended first  |
//                                                                         ^ the next text's place
//
// From right to left, the texts that do not run lose their blocks when others need them. One place
// more than n_places exists, so that the text that ended last is always there to be shared.

static void take_block(Engine *e, Text *t, int block) {
    e->n_unused -= e->users[block]++ == 0;
    t->blocks[t->n_blocks++] = block;
}

static void drop_blocks(Engine *e, Text *t) {
    while (t->n_blocks > 0) e->n_unused += --e->users[t->blocks[--t->n_blocks]] == 0;
    t->run = 0;
}

// Gives a text the blocks that it lacks for its ids and `more`, if `spare` others stay unused. For
// that, texts that do not run lose theirs. Returns false if there are too few.
static bool take_blocks(Engine *e, Text *t, int more, int spare) {
    const State *s = &e->model.state;
    const size_t n = min_size(t->ids.n + more, s->seq_len);  // the last id may lie behind it
    int lacks = (int)((n + s->block_len - 1) / s->block_len) - t->n_blocks;
    for (int i = e->n_places; i >= e->n_running && e->n_unused < lacks + spare; i--)
        drop_blocks(e, e->active[i]);
    if (e->n_unused < lacks + spare) return false;
    for (int block = 0; lacks > 0; block++) {
        if (e->users[block]) continue;
        take_block(e, t, block);
        lacks--;
    }
    return true;
}

// The text that has the most first ids, *same, in common with t, and has run or will run them. It
// may be t itself, whose blocks may still be there. The last known id does not count: it always
// runs, as its logits are needed.
static Text *find_alike(Engine *e, Text *t, size_t *same) {
    Text *best = t;
    *same = t->run;
    for (Text *other = e->places; other <= e->places + e->n_places; other++) {
        const size_t there = other->ending == GOES_ON ? other->ids.n : other->run;
        const size_t end = min_size(there, t->known - 1);
        size_t n = 0;
        if (other == t || other->n_blocks == 0) continue;
        while (n < end && t->ids.p[n] == other->ids.p[n]) n++;
        if (n <= *same) continue;
        best = other;
        *same = n;
    }
    return best;
}

// Starts the first text that waits: the ids that it shares count as having run. Returns false if it
// goes on waiting. Beside the blocks that it lacks, one has to be left for each text that runs, as
// it may soon need one. A text that runs alone may have them all.
static bool start_text(Engine *e) {
    Text *t = e->active[e->n_running];
    size_t same;
    const Text *alike = find_alike(e, t, &same);
    const size_t len = e->model.state.block_len;
    if (same >= alike->run + len) return false;  // it waits: a block or more of these will run soon
    const size_t run = min_size(same, alike->run), whole = run / len;
    const int *theirs = alike->blocks;
    if (alike != t) {
        drop_blocks(e, t);
        while (t->n_blocks < (int)whole) take_block(e, t, theirs[t->n_blocks]);
        t->run = whole * len;
    }
    e->n_running++;  // it keeps what it has
    if (!take_blocks(e, t, 0, e->n_running) && (e->n_running > 1 || !take_blocks(e, t, 0, 0))) {
        e->n_running--;
        return false;                            // it waits for blocks
    }
    // take_blocks may have taken the block from `alike`, but nothing has overwritten it.
    if (run % len) cache_copy(&e->model, t->blocks[whole], theirs[whole]);
    t->run = run;
    if (t->before > run) e->again += t->before - run;
    if (t->before == 0) t->cached = run;
    t->before = 0;
    return true;
}

static void start_texts(Engine *e) {
    while (e->n_running < e->n_active && start_text(e)) {}
}

// A new text, which waits to run, takes the place of the one that ended the longest time ago.
static Text *add_text(Engine *e, const int *ids, size_t n) {
    Text *t = e->active[e->n_places], **free = e->active + e->n_active++;
    const size_t vocab_size = e->tokenizer.vocab_size;
    Ids its = t->ids;
    memmove(free + 1, free, (e->active + e->n_places - free) * sizeof(*free));
    *free = t;
    drop_blocks(e, t);
    its.p = grow(its.p, &its.cap, n, e->model.state.seq_len + 1, sizeof(int));
    its.n = n;
    memcpy(its.p, ids, n * sizeof(int));
    *t = (Text){.ids = its, .known = n, .prompt = n, .blocks = t->blocks, .sampler = t->sampler,
                .writer = t->writer, .out = {t->out.p, 0, t->out.cap}};
    memset(t->sampler.answered, 0, vocab_size * sizeof(bool));
    memset(t->sampler.seen, 0, vocab_size * sizeof(bool));
    for (size_t i = 0; i < n; i++) t->sampler.seen[ids[i]] = true;
    return t;
}

// A text has ended, or is stopped: its place is free. What has run stays there.
static void remove_text(Engine *e, Text *t) {
    int at = 0;
    if (t->ending == GOES_ON) t->ending = INTERRUPTED;
    while (e->active[at] != t) at++;
    e->n_running -= at < e->n_running;
    e->n_active--;
    memmove(e->active + at, e->active + at + 1, (e->n_active - at) * sizeof(*e->active));
    e->active[e->n_active] = t;
}

// ------------------------------------------------------------------------------------------------
// Drafts: prompt lookup decoding (Saxena 2023). An answer often repeats what the context holds:
// code that it changes, text that it quotes. Where the last NGRAM tokens occurred before, the
// tokens that followed there are a draft of what comes next. Random numbers are drawn only for rows
// that are used. So drafts change the time and nothing else: the text is the same, not just its
// distribution as in speculative decoding (Leviathan et al., arXiv 2211.17192).
//
// All texts of a pass share its draft_rows() rows; a text gets twice as many after a draft that was
// right to its end. With -b 1, or while a prompt runs, there are none. A drafted token costs
// DRAFT_COST, a right one earns twice as much, every pass earns 1, and while this credit is
// negative there are no drafts: wrong ones take at most 2 % of the time, also with experts, where a
// drafted token takes half the time of another.
enum { NGRAM = 5, DRAFT_COST = 20, MOST_CREDIT = 40 * DRAFT_COST };

// Guesses what may follow a text, up to `most` ids, from the latest place where its end fits, as
// far as the context and unused blocks reach. A draft that runs into itself repeats itself.
static void draft_text(Engine *e, Text *t, int most) {
    const State *s = &e->model.state;
    int *ids = t->ids.p;
    const size_t n = t->ids.n, size = NGRAM * sizeof(int);
    const size_t blocks = (size_t)(t->n_blocks + e->n_unused) * s->block_len;
    size_t from = n - 1;
    most = min_int(most, (int)(min_size(s->seq_len, blocks) - n));
    if (most < 1 || e->credit < 0) return;
    while (from >= NGRAM && memcmp(ids + from - NGRAM, ids + n - NGRAM, size) != 0) from--;
    if (from < NGRAM) return;
    e->credit -= DRAFT_COST * most;
    t->guesses = t->drafted = most;
    for (int i = 0; i < most; i++) ids[n + i] = ids[from + i];
    take_blocks(e, t, most, 0);
}

// Drafts for all texts, if each of them decodes: it has one id that has not run.
static void draft_texts(Engine *e) {
    bool decodes = e->mode <= GENERATE;
    e->credit = min_int(e->credit + 1, MOST_CREDIT);
    for (int i = 0; i < e->n_running; i++) {
        const Text *t = e->active[i];
        decodes &= t->run + 1 == t->ids.n && t->known == t->ids.n && !t->chooses;
        e->credit += 2 * DRAFT_COST * (t->drafted - t->guesses);
    }
    for (int i = 0; i < e->n_running; i++) {
        Text *t = e->active[i];
        const bool right = t->drafted > 0 && t->guesses == 0;  // to its end
        const int rows = min_int((1 + right) * draft_rows(), e->model.state.logit_rows);
        t->guesses = t->drafted = 0;
        if (decodes) draft_text(e, t, rows / e->n_running - 1);
    }
}

// A prompt has its blocks, but an answer may need another one. If there is none, the youngest text,
// perhaps this one, has to wait. A text that runs alone never has to, as it may take all blocks.
static void schedule(Engine *e) {
    start_texts(e);
    for (int i = 0; i < e->n_running; i++) {
        Text *t = e->active[i];
        while (i < e->n_running && !take_blocks(e, t, 0, 0)) {
            Text *last = e->active[--e->n_running];
            last->before = last->run;
        }
    }
    draft_texts(e);
}

// ------------------------------------------------------------------------------------------------
// Writing: progress, messages, an answer as it comes. No file and no model drives the terminal: see
// add_printable. A terminal shows a chat's thinking dimmed; elsewhere it goes to stderr.

static bool is_control(uint32_t c) { return c < ' ' || (c >= 127 && c < 160); }

// Appends a text as a terminal may show it: bytes that are not UTF-8 and control characters become
// U+FFFD. Of those that make lines and columns, an answer keeps some: \n, \r\n and \t.
static void add_printable(Buffer *out, Bytes text, bool answer) {
    for (size_t at = 0; at < text.n;) {
        const Char c = code_point_at(text, at);
        const bool crlf = c.c == '\r' && at + 1 < text.n && text.p[at + 1] == '\n';
        const bool kept = answer && (c.c == '\n' || c.c == '\t' || crlf);
        const bool shown = kept || (c.c < BAD_BYTE && !is_control(c.c));
        buffer_add(out, shown ? (Bytes){text.p + at, c.n} : bytes("\uFFFD"));
        at += c.n;
    }
}

// What a terminal shows of a prompt or a list that takes longer than two seconds
static struct Progress {
    size_t tokens;        // of a prompt that runs, or 0
    size_t layers;        // of the model
    size_t done;          // tokens times layers that ran
    double start;         // when it began
    double drawn;         // when a line was last drawn
    bool shown;           // the line is there
} progress;

// Clears the line, before an answer, a notice or an error begins.
static void progress_end(void) {
    if (progress.shown) fputs("\r\033[K", stderr);
    progress.shown = false;
    progress.tokens = 0;
}

// Shows what is done: about `tokens` tokens so far. They are `part` of the work (0: nobody knows),
// whose rest counts with the same rate. (A prompt's takes longer: attention reads more and more.)
static void progress_show(double tokens, double part, const char *done) {
    const double time = now(), seconds = time - progress.start, rate = tokens / seconds;
    if (quiet || seconds < 2 || time < progress.drawn + 0.1 || !is_terminal(STDERR_FILENO)) return;
    progress.drawn = time;
    progress.shown = true;
    fprintf(stderr, "\r%s, %.*f tokens/s", done, rate < 999.95, rate);
    if (part > 0) fprintf(stderr, ", %.0f s left", seconds * (1 / part - 1));
    fputs("\033[K", stderr);
}

static void progress_add(int n) {
    char text[64];
    if (progress.tokens == 0) return;
    progress.done += n;
    const size_t done = progress.done / progress.layers, all = progress.tokens;
    snprintf(text, sizeof(text), "%zu of %zu tokens", done, all);
    if (done == all) progress_end();
    else progress_show(done, (double)done / all, text);
}

static void report(const char *fmt, ...) {
    char text[1 << 13];  // two paths and what is wrong; a longer message loses its end
    uint8_t line[3 * sizeof(text) + 1];
    Buffer shown = {line, 0, sizeof(line)};  // it has room enough: memory may have run out
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    add_printable(&shown, bytes(text), false);
    progress_end();
    fprintf(stderr, "qwen3: %.*s\n", (int)shown.n, line);
}

// Appends a text in printf's format, of less than 512 bytes.
__attribute__((format(PRINTF, 2, 3))) static void buffer_print(Buffer *b, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    buffer_add(b, bytes(text));
}

static void buffer_cut(Buffer *b, size_t n) {  // takes n bytes away at the start
    b->n -= n;
    if (b->n) memmove(b->p, b->p + n, b->n);
}

struct Writer {
    bool chat;      // thinking is set apart from the answer
    bool terminal;  // stdout is a terminal
    bool thinking;
    bool between;   // it has thought, and only newlines came since: only a terminal shows these
    Buffer *to;     // of a list: the answer goes there, its thinking nowhere; NULL: to stdout
    Bytes stop;     // -x: the answer ends before this text
    size_t cut;     // bytes that were drawn, but are not written because of it
    Buffer held;    // text that is not written yet
};

// How many bytes at the end must wait for what follows: an unfinished UTF-8 character; if it goes
// through add_printable also a carriage return, as only one before a newline is kept
static size_t unfinished(Bytes text, bool printable) {
    if (printable && text.n && text.p[text.n - 1] == '\r') return 1;
    for (size_t n = 1; n <= 3 && n <= text.n; n++) {
        const uint8_t *last = text.p + text.n - n;
        const uint8_t rest = *last & 15 ? 0x80 : 0xBF;  // after E0 and F0, 0x80 would be overlong
        uint8_t u[4] = {rest, rest, rest, rest};
        memcpy(u, last, n);
        if (code_point_at((Bytes){u, 4}, 0).n > (int)n) return n;
    }
    return 0;
}

// Writes what is held, except its last `keep` bytes. For a terminal, each piece is dimmed by
// itself, in one write: no signal can leave the terminal dim.
static void writer_flush(Writer *out, size_t keep) {
    const Bytes text = {out->held.p, out->held.n - keep};
    const char *no_color = getenv("NO_COLOR");
    const bool dim = out->terminal && out->thinking && !(no_color && *no_color);
    Buffer shown = {0};
    if (text.n == 0) return;
    if (dim) buffer_add(&shown, bytes("\033[2m"));
    if (out->terminal || (out->thinking && !out->to)) add_printable(&shown, text, true);
    if (dim) buffer_add(&shown, bytes("\033[0m"));
    if (out->terminal) write_stdout(bytes_of(&shown));
    else if (out->thinking && !out->to && !quiet) fwrite(shown.p, 1, shown.n, stderr);
    else if (!out->thinking && out->to) buffer_add(out->to, text);
    else if (!out->thinking) write_stdout(text);
    buffer_cut(&out->held, text.n);
    free(shown.p);
}

// The writer's answer begins or ends, or its thinking does: what comes now is thinking, or not.
static void writer_thinks(Writer *out, bool thinking) {
    out->between = out->thinking && !thinking;
    if (out->between && !out->terminal) buffer_add(&out->held, bytes("\n"));
    writer_flush(out, 0);
    out->thinking = thinking && out->chat;
}

static bool writer_token(Writer *out, const Tokenizer *tok, int id) {
    Buffer *held = &out->held;
    Bytes text = tok->kind[id] & SPECIAL ? (Bytes){0} : tok->text[id];
    if (id == tok->think && out->chat) writer_thinks(out, true);
    for (; out->between && text.n && *text.p == '\n'; text = bytes_from(text, 1)) {
        if (out->terminal) write_stdout(bytes("\n"));
    }
    if (text.n) out->between = false;
    buffer_add(held, text);
    const Bytes stop = out->thinking ? (Bytes){0} : out->stop;
    size_t at = stop.n ? 0 : held->n;  // where the stop text begins, or may begin
    while (at < held->n && memcmp(held->p + at, stop.p, min_size(stop.n, held->n - at)) != 0) at++;
    if (stop.n && held->n - at >= stop.n) {
        out->cut = held->n - at;
        held->n = at;
        return false;
    }
    const size_t waits = unfinished((Bytes){held->p, at}, out->terminal || out->thinking);
    writer_flush(out, held->n - at + waits);
    if (id == tok->end_think && out->thinking) writer_thinks(out, false);
    return true;
}

static void writer_end(Writer *out) {
    writer_thinks(out, false);
    if (!out->to && (out->chat || out->terminal)) write_stdout(bytes("\n"));
}

// ------------------------------------------------------------------------------------------------
// Requests: an answer, an embedding, or a score, also one of several texts together. A text longer
// than the context is scored in pieces, each of which begins with the last id of the one before.
//
// Given answers (-o): how likely is it that the answer begins with each of several TEXTs? The
// prompt's last logits give the probability of the first id of each. For the other ids of a TEXT,
// the prompt and the TEXT are a text that is scored from there and shares the prompt's blocks.
// Where another TEXT begins with a TEXT, the answer also has to end after it: so at most one comes
// true, and probabilities can be added up. A model's thinking becomes a part of the prompt.

typedef struct Choice {  // a given answer
    Bytes text;
    Ids ids;             // with ANY_STOP at the end, if another one begins with it
    size_t n;            // ids without ANY_STOP
} Choice;

typedef struct Request {
    Ids ids;             // the prompt
    uint64_t rng;        // of its first random number
    int texts;           // how many it has,
    int begun;           // how many of them were added,
    int ended;           // how many of these have ended
    double *scores;      // (texts, or n_choices) -log of their probabilities
    Text *prompt;        // that of the prompt
    Ending ending;       // of its texts
    // Of a list only:
    size_t number;       // of its line, from 0
    Buffer line;         // of the output, empty until it is done
} Request;

#define NOT_FINITE "model: the logits are not finite; is the file damaged?"
#define BAD_VECTOR "model: the vector is not finite; is the file damaged?"

// From Qwen3's technical report, section 4.3
static const char closing[] = "\n\nConsidering the limited time by the user, I have to give the "
    "solution based on the thinking directly now.\n</think>\n\n";

enum { ANY_STOP = -1 };  // the last id of a given answer: any of the tokens that end an answer

static double logit_of(const Tokenizer *tok, const float *logits, int id) {
    double max = -INFINITY, sum = 0;
    if (id != ANY_STOP) return logits[id];
    for (size_t i = 0; i < tok->stop.n; i++) max = fmax(max, logits[tok->stop.p[i]]);
    for (size_t i = 0; i < tok->stop.n; i++) sum += exp(logits[tok->stop.p[i]] - max);
    return max + log(sum);
}

static bool begins_with(const Ids *a, const Ids *b) {
    return a->n >= b->n && memcmp(a->p, b->p, b->n * sizeof(int)) == 0;
}

static void encode_choices(Engine *e) {
    if (e->n_choices == 0) return;  // `choices` is NULL
    for (Choice *c = e->choices; c < e->choices + e->n_choices; c++) {
        encode_part(&e->tokenizer, c->text, e->mode == GENERATE, &c->ids);
        c->n = c->ids.n;
        if (c->n > e->longest) e->longest = c->n;
    }
    for (Choice *c = e->choices, *end = c + e->n_choices; c < end; c++) {
        bool begins = false;  // another one
        for (Choice *other = e->choices; other < end; other++) {
            if (other == c || !begins_with(&other->ids, &c->ids)) continue;
            if (other->n == c->n) die("-o: two answers have the same tokens: %.*s, %.*s",
                                      (int)c->text.n, c->text.p, (int)other->text.n, other->text.p);
            begins = true;
        }
        if (begins) ids_add(&c->ids, ANY_STOP);
        if (c->ids.n > 1) ids_add(&e->longer, (int)(c - e->choices));
    }
}

// Ends a text's thinking by ids that nobody drew. Where answers are given, they all come, whatever
// -n says, and now all ids of the text are the prompt of these answers.
static Ending end_thinking(const Engine *e, Text *t, const Ids *ids) {
    Ending ending = GOES_ON;
    for (size_t i = 0; i < ids->n && (ending == GOES_ON || e->n_choices); i++)
        ending = append_id(e, t, ids->p[i]);
    if (e->n_choices == 0) return ending;
    t->chooses = t->ids.n;
    return GOES_ON;
}

// Is there no room for more thinking, as the closing text, the longest TEXT and a row have to fit?
static bool is_full(const Engine *e, const Text *t) {
    return t->ids.n + e->closing.n + e->longest + 1 >= (size_t)e->model.state.seq_len;
}

static Ending take_drawn(const Engine *e, Text *t, int id) {
    const bool chooses = e->n_choices > 0, thought = t->writer->thinking;
    if (chooses && !thought && id != e->tokenizer.think) {  // no thinking: this id is dropped, and
        t->run--;               // the last row runs again, as drawing has overwritten its logits
        return end_thinking(e, t, &(Ids){0});
    }
    const Ending ending = append_id(e, t, id);
    if (!t->writer->thinking) return thought && chooses ? end_thinking(e, t, &e->blank) : ending;
    const bool counts = thought && ending != TURN_ENDED;  // <think> does not, nor does a stop token
    t->thought += counts;
    const bool spent = counts && t->thought == e->budget && ending == GOES_ON;
    const bool must_end = chooses && (ending != GOES_ON || is_full(e, t));
    if (!spent && !must_end) return ending;
    t->closed = true;
    return end_thinking(e, t, &e->closing);
}

static void score_choices(const Engine *e, Text *t) {
    double *scores = t->request->scores;
    float *logits = logits_of(e, t->first);
    t->ending = isfinite(sum_double(logits, e->tokenizer.vocab_size)) ? TURN_ENDED : FAILED;
    for (int i = 0; i < e->n_choices; i++) scores[i] = -logits[e->choices[i].ids.p[0]];
    const double all = log_sum_exp(logits, e->tokenizer.vocab_size);
    for (int i = 0; i < e->n_choices; i++) scores[i] += all;
}

static void start_request(const Engine *e, Request *r) {
    const size_t most = e->model.state.seq_len - 1;  // ids to score in a piece
    const size_t n = r->ids.n - 1;                   // and in all
    r->texts = e->mode == PERPLEXITY ? (int)((n + most - 1) / most) : 1;
    const int scores = max_int(r->texts, e->n_choices);
    r->scores = grow(NULL, &(size_t){0}, 0, scores, sizeof(double));
    memset(r->scores, 0, scores * sizeof(double));
}

// Adds the prompt, or its next piece.
static void add_prompt(Engine *e, Request *r) {
    const size_t most = e->model.state.seq_len, start = r->begun * (most - 1);
    Text *t = add_text(e, r->ids.p + start, min_size(r->ids.n - start, most));
    t->request = r;
    t->score = r->scores + r->begun++;
    t->sampler.rng = r->rng;
    r->prompt = t;
    if (e->mode == PERPLEXITY) t->known = 1;
    writer_thinks(t->writer, e->thinks);
    if (e->n_choices && (!e->may_think || e->max_new == 0 || is_full(e, t)))
        end_thinking(e, t, e->thinks ? &e->closing : &(Ids){0});
}

// The next given answer with several ids takes the place of the prompt, or of such an answer: so
// the blocks of what lies before it stay. Without one, t is NULL, it gets a place.
static void add_choice(Engine *e, Request *r, Text *t) {
    const int i = e->longer.p[r->begun++ - 1];
    const Ids *more = &e->choices[i].ids;
    const size_t n = r->prompt->chooses;
    if (!t) t = add_text(e, r->prompt->ids.p, n);
    t->ids.n = n;
    for (size_t k = 0; k < more->n; k++) ids_add(&t->ids, more->p[k]);
    t->run = min_size(t->run, n);
    t->known = n + 1;
    t->ending = GOES_ON;
    t->request = r;
    t->score = r->scores + i;
}

// Adds texts of a request, as many as there are places. Returns whether these are all.
static bool add_texts(Engine *e, Request *r) {
    while (r->begun < r->texts && e->n_active < e->n_places) {
        if (r->begun > 0 && e->n_choices) add_choice(e, r, NULL);
        else add_prompt(e, r);
    }
    return r->begun == r->texts;
}

static Text *find_ended(const Engine *e) {
    for (int i = 0; i < e->n_running; i++) {
        if (e->active[i]->ending != GOES_ON) return e->active[i];
    }
    return NULL;
}

// A text has ended. After the prompt of given answers these come, if they have several ids; else
// its place is free. Returns whether its request is done.
static bool end_text(Engine *e, Text *t) {
    Request *r = t->request;
    if (r->ending != FAILED) r->ending = t->ending;
    if (r->texts == 1) {
        const bool ended = t->ending == TURN_ENDED;
        e->cached += t->cached;
        e->drawn += t->ids.n - t->prompt;
        for (int i = 0; ended && i < e->n_choices; i++) e->drawn += e->choices[i].n;
        r->texts += ended ? (int)e->longer.n : 0;
    }
    r->ended++;
    if (e->n_choices && r->begun < r->texts) {
        add_choice(e, r, t);
        return false;
    }
    remove_text(e, t);
    return r->ended == r->texts;
}

// The numbers of the given answers, the likeliest first. One's probability among all is exp(first
// score - its own) / *sum, that of all exp(-first score) * *sum. The TEXTs' order changes no bit.
static int *rank_choices(const Engine *e, const double *scores, double *sum) {
    int *all = grow(NULL, &(size_t){0}, 0, e->n_choices, sizeof(*all));
    *all = 0;
    for (int i = 0, at; i < e->n_choices; i++) {
        for (at = i; at > 0 && scores[i] < scores[all[at - 1]]; at--) all[at] = all[at - 1];
        all[at] = i;
    }
    *sum = 0;
    for (int i = 0; i < e->n_choices; i++) *sum += exp(scores[*all] - scores[all[i]]);
    return all;
}

// Writes the likeliest one, and to stderr how likely all are.
static void writer_choose(Writer *out, const Engine *e, const Request *r) {
    double sum, *scores = r->scores;
    int *all = rank_choices(e, scores, &sum);
    Buffer line = {0};
    buffer_add(&out->held, e->choices[*all].text);
    writer_end(out);
    for (int i = 0; i < e->n_choices; i++) {
        buffer_add(&line, bytes(i ? ", " : "qwen3: choices: "));
        add_printable(&line, e->choices[all[i]].text, false);
        buffer_print(&line, " %.6f", exp(scores[*all] - scores[all[i]]) / sum);
    }
    buffer_print(&line, " (%.6f of all answers)\n", exp(-scores[*all]) * sum);
    if (!quiet) fwrite(line.p, 1, line.n, stderr);
    free(all);
    free(line.p);
}

// ------------------------------------------------------------------------------------------------
// Conversation: a prompt and its answer, turns that fit into the context, messages from a terminal

static const char *const mode_names[] = {"chat", "generate", "tokenize", "perplexity", "embed"};

typedef struct {  // of the command line. Not given: NULL, or -1 of a number without a default
    const char *model;
    const char *text;      // -i
    const char *file;      // -f
    const char *list;      // -l
    const char *json_list; // -L
    const char *out;       // -w
    const char *system;    // -y
    const char *stop;      // -x
    const char *answers;   // -o
    Choice *choices;       // (n_choices) the TEXTs of -o
    int n_choices;
    int mode;
    int think;
    int n;                 // -1: no limit
    int context;
    int threads;
    int batch;
    float temperature;
    int top_k;
    float top_p;
    float repetition;
    float presence;
    unsigned long long seed;
    bool seeded;           // -s was given
    bool verbose;
} Options;

static bool is_list(const Options *o) { return o->list || o->json_list; }

typedef struct {
    Options options;
    Engine engine;
    bool can_switch;  // thinking can be switched on and off,
    bool switched_on; // and is on: -r
    bool noticed;     // the notices have been given
    bool dialogue;    // a conversation at a terminal, which goes on after an error
    Conversation conversation;
    Buffer input;     // the prompt's text, or the message being typed
    Ids prompt;
    uint64_t rng;     // of the conversation's next answer
} App;

// Finds whether -r has an effect, and who may open the thinking, the prompt or the model. A chat
// format that cuts thinking off earlier answers is that of a model that thinks.
static void find_thinking(App *app) {
    Engine *e = &app->engine;
    const ChatFormat *f = &e->tokenizer.chat;
    app->can_switch = !bytes_equal(f->answer[0], f->answer[1]);
    app->switched_on = app->can_switch && app->options.think > 0;
    const Bytes answer = f->answer[app->switched_on];
    const size_t open = find_last(answer, bytes("<think>"));
    const size_t close = find_last(answer, bytes("</think>"));
    const bool model = !open && !close && e->tokenizer.think >= 0 && f->strip.n;
    e->thinks = e->mode == CHAT && open > close;
    e->may_think = e->thinks || (e->mode == CHAT && model);
}

// Prepares the places for texts; what is never touched takes no memory. Answers go to stdout, or in
// a list into `out`. Where the options do not say how tokens are drawn, it is as the checkpoint
// asks for; but with thinking switched off as Qwen advises, unless it asks for greedy answers.
static void prepare_places(App *app) {
    const Options *o = &app->options;
    Engine *e = &app->engine;
    const State *s = &e->model.state;
    const Tokenizer *tok = &e->tokenizer;
    const bool list = is_list(o), chat = e->mode == CHAT;
    const bool advised = chat && app->can_switch && !app->switched_on && tok->temperature != 0;
    app->rng = o->seed;
    e->n_places = list || o->n_choices ? max_int(min_int(PLACES, s->batch), 1) : 1;
    e->n_unused = s->blocks;
    e->users = alloc(s->blocks, sizeof(int), "the texts");
    e->scores = alloc(s->logit_rows, sizeof(double), "the texts");
    for (int i = 0; i <= e->n_places; i++) {
        Text *t = e->active[i] = &e->places[i];
        t->blocks = alloc(s->seq_len, sizeof(int), "the texts");
        t->sampler = (Sampler){
            .temperature = o->temperature >= 0 ? o->temperature : advised ? 0.7f : tok->temperature,
            .top_p = o->top_p >= 0 ? o->top_p : advised ? 0.8f : tok->top_p,
            .top_k = o->top_k >= 0 ? o->top_k : advised ? 20 : tok->top_k,
            .presence = o->presence,
            .repetition = o->repetition >= 0 ? o->repetition : tok->repetition,
            .answered = alloc(tok->vocab_size, sizeof(bool), "the sampler"),
            .seen = alloc(tok->vocab_size, sizeof(bool), "the sampler"),
        };
        t->writer = alloc(1, sizeof(Writer), "the texts");
        *t->writer = (Writer){.chat = chat, .terminal = !list && is_terminal(STDOUT_FILENO),
                              .to = list ? &t->out : NULL, .stop = bytes(o->stop ? o->stop : "")};
    }
}

// What stderr says before the model runs: the prompt's ids, and the first time the notices. These
// wait until the last check has passed, so that an error message stands alone.
static void give_notices(App *app) {
    const Options *o = &app->options;
    const Engine *e = &app->engine;
    const size_t context = e->model.state.seq_len;
    const Mode mode = e->mode;
    const bool chat = mode == CHAT;
    const bool reads_stdin = o->file ? !strcmp(o->file, "-") : !o->text || is_list(o);
    if (o->verbose && mode != TOKENIZE && app->prompt.n) {
        fputs("prompt ids:", stderr);
        for (size_t i = 0; i < app->prompt.n; i++) fprintf(stderr, " %d", app->prompt.p[i]);
        fputc('\n', stderr);
    }
    if (app->noticed) return;
    app->noticed = true;
    if (!e->tokenizer.tables->has_classes)
        notice("tokenizer: no Unicode data, exact on ASCII only; export the model again");
    if (o->mode < 0 && !chat)
        notice("mode: %s, as this is no chat model; -m chat overrides it", mode_names[mode]);
    if (chat && o->think >= 0 && !app->can_switch && !(o->think > 1 && e->may_think))
        notice("-r: no effect, this model's thinking can't be switched");
    if (!chat && o->system) notice("-y: no effect, only -m chat has a system prompt");
    if (!chat && o->think >= 0) notice("-r: no effect, only -m chat thinks");
    if (mode > GENERATE && o->stop) notice("-x: no effect, only an answer can end early");
    if (mode > GENERATE && o->n >= 0) notice("-n: no effect, only an answer has new tokens");
    if (mode <= GENERATE && o->stop && strstr(o->stop, "\\n"))
        notice("-x: these are a backslash and an n, for a newline: -x $'\\n'");
    if (mode == PERPLEXITY && app->prompt.n > context)
        notice("text: %zu tokens are scored in pieces of %zu (-c)", app->prompt.n, context);
    if (chat && (app->switched_on || e->thinks) && e->places->sampler.temperature == 0)
        notice("-t 0: greedy thinking tends to repeat without end, Qwen advises 0.6");
    if (!reads_stdin && stdin_has_data())
        notice("stdin: has data that was not read; -f - would add all of it");
}

// What is wrong with a text of so many bytes and n tokens (or of more bytes than a text can have),
// or NULL. A perplexity is scored in pieces. Given answers need room behind the prompt, and the end
// of thinking before them.
static const char *wrong_length(const App *app, size_t size, size_t n, const char *unit) {
    static char what[160];
    const Engine *e = &app->engine;
    const bool scored = e->mode == PERPLEXITY;
    const size_t context = e->model.state.seq_len, all = e->model.config.max_seq_len;
    const size_t behind = e->longest + (e->n_choices && e->may_think ? e->closing.n + 1 : 0);
    const size_t least = scored ? 2 : 1;
    const size_t most = scored ? INT_MAX : context - min_size(context, behind);
    char hint[64] = "-c can't be larger";
    if (e->mode == TOKENIZE) return NULL;
    if (size == 0 && (e->mode == CHAT || e->mode == EMBED)) return "empty, expected a text";
    if (n >= least && n <= most) return NULL;
    if (context < all) snprintf(hint, sizeof(hint), "-c, up to %zu", all);
    if (n < least)
        snprintf(what, sizeof(what), "%s, expected %zu or more tokens, found %zu",
                 n ? "too short" : "empty", least, n);
    else
        snprintf(what, sizeof(what), "too long, expected at most %zu tokens (%s), found %zu%s",
                 most, hint, n, unit);
    return what;
}

// Can the prompt run? If it can't, that is said, and ends the program, unless this is a dialogue.
static bool check_length(const App *app, size_t size) {
    const char *error = wrong_length(app, size, app->prompt.n, "");
    if (error) report("prompt: %s", error);
    if (error && !app->dialogue) exit(EXIT_FAILURE);
    return !error;
}

static Message *conversation_add(Conversation *talk, int role, Bytes text) {
    talk->p = grow(talk->p, &talk->cap, talk->n, 1, sizeof(Message));
    talk->p[talk->n] = (Message){.role = role};
    buffer_add(&talk->p[talk->n].text, text);
    return &talk->p[talk->n++];
}

// Removes messages first .. end - 1.
static void conversation_drop(Conversation *talk, size_t first, size_t end) {
    for (size_t i = first; i < end; i++) {
        free(talk->p[i].text.p);
        free(talk->p[i].ids.p);
    }
    for (size_t i = end; i < talk->n; i++) talk->p[first + i - end] = talk->p[i];
    talk->n -= end - first;
}

// Is anything drawn? Given answers are not, but thinking before them is, unless -n is 0.
static bool draws_ids(const Engine *e) {
    return e->mode <= GENERATE && (!e->n_choices || (e->may_think && e->max_new));
}

// Runs a request alone, to its end or Ctrl-C. Returns the time when the whole prompt had run.
static double run_request(App *app, Request *r) {
    Engine *e = &app->engine;
    double ran = 0;
    start_request(e, r);
    add_texts(e, r);
    start_texts(e);
    const size_t n = e->mode == PERPLEXITY ? r->ids.n - 1 : r->prompt->ids.n;  // rows
    progress = (struct Progress){.tokens = n - r->prompt->run,
                                 .layers = e->model.config.n_layers, .start = now()};
    while (r->ended < r->texts && run_pass(e)) {
        if (ran == 0 && e->needed) ran = now();
        draw_all(e);
        for (Text *ended; (ended = find_ended(e));) end_text(e, ended);
        add_texts(e, r);
    }
    progress_end();
    if (r->ended < r->texts) r->ending = INTERRUPTED;
    if (r->ending == FAILED) die("%s", e->mode == EMBED ? BAD_VECTOR : NOT_FINITE);
    while (e->n_active > 0) remove_text(e, e->active[0]);
    return ran ? ran : now();
}

// Runs the prompt and writes its answer, the conversation's next message; then notices and
// statistics. If -x ended the answer, tokens of which nothing was written are taken back, and the
// beginning of one that was written in part becomes the message's text. False: Ctrl-C came first.
static bool respond(App *app) {
    Message *message = conversation_add(&app->conversation, ASSISTANT, (Bytes){0});
    Ids *answer = &message->ids;
    Engine *e = &app->engine;
    const Tokenizer *tok = &e->tokenizer;
    const double start = now();
    Request r = {.ids = app->prompt, .rng = app->rng};
    const double middle = run_request(app, &r);
    const Text *t = r.prompt;
    Writer *out = t->writer;
    app->rng = t->sampler.rng;
    for (size_t i = t->prompt; i < t->ids.n; i++) ids_add(answer, t->ids.p[i]);
    const size_t done = t->ending == INTERRUPTED ? min_size(t->run, t->prompt) : t->prompt;
    const size_t drawn = e->n_choices ? e->drawn : answer->n;
    const double p = (done - t->cached) / (middle - start + 1e-9);
    const double g = drawn / (now() - middle + 1e-9);
    const char *where = out->thinking ? " inside its thinking" : "";
    char seed[32] = "";
    if (e->n_choices && r.ending == TURN_ENDED) writer_choose(out, e, &r);
    else writer_end(out);
    if (t->closed) notice("answer: its thinking was ended after %d tokens", t->thought);
    if (r.ending == LIMIT_REACHED)
        notice("answer: ended%s by -n after %zu tokens", where, answer->n);
    if (r.ending == CONTEXT_ENDED)
        notice("answer: ended%s by a full context of %d tokens (-c)", where,
               e->model.state.seq_len);
    if (draws_ids(e)) snprintf(seed, sizeof(seed), ", seed %llu", app->options.seed);
    if (!quiet)
        fprintf(stderr,  // rates with a decimal only below 1,000
                "prompt %zu tokens at %.*f/s (%zu cached), answer %zu at %.*f/s%s\n", done,
                p < 999.95, p, t->cached, drawn, g < 999.95, g, seed);
    for (size_t lost, *cut = &out->cut; *cut > 0; *cut -= lost) {
        const int id = answer->p[--answer->n];
        const Bytes text = tok->kind[id] & SPECIAL ? (Bytes){0} : tok->text[id];
        lost = min_size(*cut, text.n);
        buffer_add(&message->text, (Bytes){text.p, text.n - lost});
    }
    free(r.scores);
    return r.ending != INTERRUPTED || answer->n > 0;
}

// Answers the conversation's last message; with `again` the one before, whose new answer takes the
// old one's place. If the prompt leaves no room for an answer (an eighth of the context), the older
// half of the turns is forgotten, again until there is room or only the question is left; if even
// that is too long, no turn is. False: there is no answer, for that reason or as Ctrl-C came first.
static bool answer_last(App *app, bool again) {
    Conversation *talk = &app->conversation;
    const Conversation asked = {talk->p, talk->n - again, 0};  // up to the question
    const size_t context = app->engine.model.state.seq_len, system = app->options.system != NULL;
    const size_t reserve = min_size(context / 8, 1024);
    const size_t room = min_size(reserve, (size_t)app->options.n);  // of -1: the largest number
    const size_t most = app->engine.model.config.max_seq_len;
    size_t first = system;
    for (;; first += (asked.n - first + 1) / 4 * 2) {  // two messages a turn; the last has one
        render(&app->engine.tokenizer, &asked, first, app->switched_on, &app->prompt);
        if (app->prompt.n + room <= context || first == asked.n - 1 || interrupted) break;
    }
    const size_t size = asked.p[asked.n - 1].text.n;  // of the question
    if (interrupted || !check_length(app, size)) return false;
    if (first > system)
        notice("context: full (%zu tokens), forgotten turns: %zu of %zu%s", context,
               (first - system) / 2, (asked.n - system + 1) / 2,
               context < most ? "; -c keeps more" : "");
    conversation_drop(talk, system, first);
    give_notices(app);
    const bool answered = respond(app);
    const size_t last = talk->n - 1;
    if (!answered) conversation_drop(talk, last, talk->n);
    else if (again) conversation_drop(talk, last - 1, last);
    return answered;
}

static void chat_turn(App *app, Bytes text) {
    Conversation *talk = &app->conversation;
    conversation_add(talk, USER, text);
    if (answer_last(app, false)) return;
    if (interrupted && app->dialogue)
        notice("chat: stopped before its answer, the message is taken back");
    conversation_drop(talk, talk->n - 1, talk->n);
}

// Without one final newline, \n or \r\n
static Bytes chop(Bytes text) {
    if (text.n && text.p[text.n - 1] == '\n' && --text.n && text.p[text.n - 1] == '\r') text.n--;
    return text;
}

enum { MOST_BYTES = INT_MAX - (1 << 17) };  // of a text: just below 2 GB

// A file may begin with U+FEFF, the byte order mark. Drops it; returns NULL, or what is wrong.
static const char *drop_mark(Bytes *file) {
    const uint8_t *p = file->p;
    if (file->n > 1 && (p[0] ^ p[1]) == 1 && (p[0] & p[1]) == 0xFE)
        return "UTF-16, expected UTF-8 (iconv -f UTF-16 -t UTF-8; PowerShell: -Encoding utf8)";
    *file = bytes_from(*file, file->n > 2 && !memcmp(p, "\uFEFF", 3) ? 3 : 0);
    return NULL;
}

typedef struct {   // of a file
    int fd;
    const char *name;
    Buffer data;   // bytes that were read
    size_t end;    // of the last line
    bool begun;    // a line was taken
    bool ended;    // the end of input has come, even if a file or a terminal has more later
} Lines;

// The next line, with its newline. One that is too long loses its end, but is still longer than
// MOST_BYTES. An empty one: more has to come first, and the caller does not wait. False: the end of
// input, or Ctrl-C.
static bool next_line(Lines *in, Bytes *line, bool wait) {
    Buffer *data = &in->data;
    const uint8_t *newline;
    size_t seen = in->end;
    *line = (Bytes){0};
    buffer_add(data, *line);  // data->p is not NULL
    while (!(newline = memchr(data->p + seen, '\n', data->n - seen))) {
        if (!wait && !input_ready(in->fd)) return true;
        buffer_cut(data, in->end);
        in->end = 0;
        seen = data->n = min_size(data->n, MOST_BYTES + 3);  // three more: see chop
        const ssize_t got = in->ended ? 0 : read_more(in->fd, data);
        if (got < 0 && !interrupted) die("%s: %s", in->name, strerror(errno));
        if (got < 0) return false;
        if ((in->ended = got == 0)) break;
    }
    const size_t start = in->end;
    in->end = newline ? (size_t)(newline - data->p) + 1 : data->n;
    *line = (Bytes){data->p + start, in->end - start};
    const char *error = in->begun ? NULL : drop_mark(line);
    if (error) die("%s: %s", in->name, error);
    in->begun = true;
    return line->n > 0;
}

// A scripted conversation: each line of stdin is a turn.
static void run_script(App *app) {
    Lines in = {.fd = STDIN_FILENO, .name = "stdin"};
    for (Bytes line; !interrupted && next_line(&in, &line, true);) {
        if (line.n > MOST_BYTES) die("stdin: a line is too long, expected less than 2 GB");
        chat_turn(app, chop(line));
    }
    free(in.data.p);
}

// A message typed or pasted at a terminal, into app->input. It reads a line at a time. Lines that
// arrive together are a paste. It waits for Enter: at the end of its last line, or, if that line
// had a newline already, on the empty line after it. A backslash at the end of a line whose
// newline was typed joins the next one to it. False: the end of input, or Ctrl-C.
static bool read_message(App *app) {
    Buffer *message = &app->input;
    bool cut = false;
    message->n = 0;
    fputs("> ", stderr);
    for (Waiting before, after = NOTHING;;) {
        const ssize_t got = read_more(STDIN_FILENO, message);
        if (got < 0 && !interrupted) die("stdin: %s", strerror(errno));
        if (got < 0 || message->n == 0) return false;
        if (got == 0) break;  // the end of input
        uint8_t *end = message->p + message->n;
        if (end[-1] != '\n') continue;  // Ctrl-D in the middle of a line
        cut |= got > TERMINAL_LINE;
        before = after;
        after = input_waits();
        if (after != NOTHING) continue;
        if (before != LINE && message->n > 1 && end[-2] == '\\') {
            end[-2] = '\n';
            message->n--;
        } else {
            if (got == 1) message->n--;  // Enter alone just sends what is there
            if (before != LINE || cut) break;
            fputs("(Enter sends) ", stderr);
        }
    }
    message->n = cut ? 0 : chop(bytes_of(message)).n;
    if (cut)
        report("input: the terminal cut a line at %d bytes; nothing was sent; /file PATH sends it",
               TERMINAL_LINE);
    return true;
}

static const char commands[] =
    "/file PATH TEXT  send TEXT and the file, or the file alone\n"
    "/retry           take the last answer back and draw another\n"
    "/clear           forget the conversation, but not the system prompt\n"
    "/help            show this\n"
    "/bye             leave; also /exit, /quit, exit, quit and Ctrl-D\n"
    "A PATH with spaces stands in quotes. A line that ends in \\ continues in the\n"
    "next. A pasted text waits for Enter. Ctrl-C stops an answer, or clears what is\n"
    "typed. For line editing and history, start the program with rlwrap before it.\n";

// Cuts the first word off a text, and the spaces after it. It ends at a space, or is quoted, as by
// many terminals into which a file is dropped.
static Bytes take_word(Bytes *text) {
    const bool quoted = text->n && (*text->p == '"' || *text->p == '\'');
    const uint8_t mark = quoted ? *text->p : ' ';
    *text = bytes_from(*text, quoted);
    const uint8_t *end = memchr(text->p, mark, text->n);
    const Bytes word = {text->p, end ? (size_t)(end - text->p) : text->n};
    *text = bytes_from(*text, min_size(word.n + 1, text->n));
    while (text->n && *text->p == ' ') *text = bytes_from(*text, 1);
    return word;
}

// Of what was typed, `text` is "PATH TEXT": sends TEXT, an empty line and the file. ~/ is $HOME.
static void send_file(App *app, Bytes text) {
    Buffer *message = &app->input;
    const Bytes name = take_word(&text);
    const char *home = name.n > 1 && !memcmp(name.p, "~/", 2) ? getenv("HOME") : NULL;
    const Bytes rest = bytes_from(name, home != NULL);
    char path[8192];
    snprintf(path, sizeof(path), "%s%.*s", home ? home : "", (int)rest.n, rest.p);
    buffer_cut(message, message->n - text.n);
    if (message->n) buffer_add(message, bytes("\n\n"));
    const size_t before = message->n;
    const unsigned mode = file_mode(path);
    const char *error = !*path ? "missing, expected /file PATH TEXT"
        : (mode && !S_ISREG(mode) && !S_ISDIR(mode)) || !strcmp(path, "-") ? "not a regular file"
        : file_read(message, path);
    if (!error && message->n == before) error = "empty, expected a text";
    if (interrupted) notice("/file: stopped, nothing was sent");
    else if (error) report("/file: %s%s%s", path, *path ? ": " : "", error);
    else chat_turn(app, chop(bytes_of(message)));
}

static bool bytes_are(Bytes text, const char *word) { return bytes_equal(text, bytes(word)); }

// Sends what was typed, or runs it if it is a command: one line, whose first word, not in quotes,
// is a slash and letters, or exit or quit alone. (The model's own switches are messages: /think,
// and /no_think, which is not letters alone.) False: it ends the program.
static bool run_message(App *app) {
    static const char *const names[] = {"/help", "/retry", "/clear",
                                        "/bye", "/exit", "/quit", "exit", "quit"};
    enum { HELP, RETRY, CLEAR, LEAVE, N_NAMES = 8 };
    Conversation *talk = &app->conversation;
    const Bytes text = bytes_of(&app->input);
    Bytes rest = text, word = take_word(&rest);
    int name = 0;
    size_t letters = 1;
    while (name < N_NAMES && !bytes_are(word, names[name])) name++;
    while (letters < word.n && isalpha(word.p[letters])) letters++;
    const bool known = name < N_NAMES, line = !memchr(text.p, '\n', text.n) && word.p == text.p;
    const bool slash = word.n > 1 && *word.p == '/' && letters == word.n;
    const bool command = slash ? !bytes_are(word, "/think") : known && rest.n == 0;
    if (memchr(text.p, '\033', text.n))
        report("input: escape characters, nothing was sent; rlwrap makes arrow keys work");
    else if (!line || !command) chat_turn(app, text);
    else if (bytes_are(word, "/file")) send_file(app, rest);
    else if (!known) report("%.*s: no such command, /help shows them", (int)word.n, word.p);
    else if (rest.n) report("%.*s takes no text, nothing was sent", (int)word.n, word.p);
    else if (name == HELP) fputs(commands, stderr);
    else if (name == CLEAR) conversation_drop(talk, app->options.system != NULL, talk->n);
    else if (name >= LEAVE) return false;
    else if (talk->n < 2) notice("/retry: there is no answer yet");
    else if (app->engine.places->sampler.temperature == 0)
        notice("/retry: -t 0 would draw the same answer again");
    else answer_last(app, true);
    return true;
}

// A conversation at a terminal
static void run_dialogue(App *app) {
    const char *thinks = app->switched_on ? "on" : app->engine.thinks ? "always" : "off";
    app->dialogue = true;
    give_notices(app);
    notice("%s: context %d, thinking %s, /help shows the commands", app->options.model,
           app->engine.model.state.seq_len, thinks);
    for (bool warned = false;; interrupted = 0) {
        if (!read_message(app)) {
            fputc('\n', stderr);
            if (!interrupted || warned) return;
            notice("chat: Ctrl-C again leaves, and so do /bye and Ctrl-D");
            warned = true;
        } else if (app->input.n > 0) {
            warned = false;
            if (!run_message(app)) return;
        }
    }
}

// ------------------------------------------------------------------------------------------------
// The modes that take a text as it is

// Appends a text as a JSON string. What is not UTF-8 is \ufffd.
static void buffer_add_json(Buffer *b, Bytes text) {
    buffer_add(b, bytes("\""));
    for (size_t at = 0; at < text.n;) {
        const Char c = code_point_at(text, at);
        if (c.c >= BAD_BYTE) buffer_print(b, "\\ufffd");
        else if (is_control(c.c)) buffer_print(b, "\\u%04x", c.c);
        else if (c.c == '"' || c.c == '\\') buffer_print(b, "\\%c", c.c);
        else buffer_add(b, (Bytes){text.p + at, c.n});
        at += c.n;
    }
    buffer_add(b, bytes("\""));
}

static void buffer_add_ids(Buffer *b, const Ids *ids, bool array) {
    buffer_add(b, bytes(array ? "[" : ""));
    for (size_t i = 0; i < ids->n; i++)
        buffer_print(b, "%s%d", i == 0 ? "" : array ? "," : " ", ids->p[i]);
    buffer_add(b, bytes(array ? "]" : ""));
}

// How likely the given answers are: the likeliest one and other members of an object
static void buffer_add_choices(Buffer *out, const Engine *e, const Request *r) {
    double sum, *scores = r->scores;
    int *all = rank_choices(e, scores, &sum);
    buffer_add_json(out, e->choices[*all].text);
    for (int i = 0; i < e->n_choices; i++) {
        buffer_add(out, bytes(i ? "," : ",\"p\":{"));
        buffer_add_json(out, e->choices[i].text);
        buffer_print(out, ":%.6f", exp(scores[*all] - scores[i]) / sum);
    }
    buffer_print(out, "},\"mass\":%.6f", exp(-scores[*all]) * sum);
    free(all);
}

static void buffer_add_score(Buffer *out, const Request *r, bool object) {
    const size_t n = r->ids.n - 1;
    double sum = 0;
    for (int i = 0; i < r->texts; i++) sum += r->scores[i];
    const double ppl = object ? fmin(exp(sum / n), DBL_MAX) : exp(sum / n);
    buffer_print(out, object ? "%zu,\"nll\":%.6f,\"ppl\":%.4f" : "tokens %zu nll %.6f ppl %.4f", n,
                 sum / n, ppl);
}

// The members that a result adds to an object of a list: by mode, then those of given answers
static const char *const members[N_MODES + 1][5] = {
    [CHAT] = {"answer", "end", "error"}, [GENERATE] = {"answer", "end", "error"},
    [EMBED] = {"vector", "error"},       [PERPLEXITY] = {"tokens", "nll", "ppl", "error"},
    [TOKENIZE] = {"ids", "error"},       [N_MODES] = {"choice", "p", "mass", "error"},
};

static int result_kind(const Engine *e) { return e->n_choices ? N_MODES : (int)e->mode; }

// Ends a line by its result or error. A line that has begun is an object: these become members.
static void add_result(Buffer *line, const Engine *e, const Request *r, const char *error) {
    static const char *const ends[] = {
        [TURN_ENDED] = "stop", [LIMIT_REACHED] = "length", [CONTEXT_ENDED] = "context"};
    const int kind = result_kind(e);
    if (kind == N_MODES && line->n == 0 && !error) buffer_add(line, bytes("{"));
    const bool object = line->n > 0;
    if (object) buffer_print(line, "\"%s\":", members[kind][0]);
    if (error) buffer_add(line, bytes("null"));
    else if (kind == N_MODES) buffer_add_choices(line, e, r);
    else if (kind == EMBED) buffer_add(line, bytes_of(&r->prompt->out));
    else if (kind == TOKENIZE) buffer_add_ids(line, &r->ids, object);
    else if (kind == PERPLEXITY) buffer_add_score(line, r, object);
    else buffer_add_json(line, bytes_of(&r->prompt->out));
    if (object && error) {
        buffer_add(line, bytes(",\"error\":"));
        buffer_add_json(line, bytes(error));
    } else if (object && kind <= GENERATE) {
        buffer_print(line, ",\"end\":\"%s\"", ends[r->ending]);
    }
    buffer_add(line, bytes(object ? "}\n" : "\n"));
}

// The answer is the last row's x after the final norm, L2-normalized, as a JSON array.
static void embed_text(const Engine *e, Text *t) {
    const Config *c = &e->model.config;
    float *x = e->model.state.x + (size_t)t->first * c->dim;
    double squares = 0;
    rmsnorm(x, x, e->model.weights.rms_final, c->dim, c->rms_norm_eps);
    for (int i = 0; i < c->dim; i++) squares += (double)x[i] * x[i];
    const double length = fmax(sqrt(squares), 1e-12);
    for (int i = 0; i < c->dim; i++) buffer_print(&t->out, "%s%.9g", i ? ", " : "[", x[i] / length);
    buffer_add(&t->out, bytes("]"));
    t->ending = isfinite(squares) ? TURN_ENDED : FAILED;
}

// The prompt of every mode but chat
static void encode_text(const App *app, Bytes text, Ids *ids) {
    const Engine *e = &app->engine;
    encode_raw(&e->tokenizer, text, ids);
    if (e->mode == GENERATE && ids->n == 0) ids_add(ids, e->tokenizer.end_of_text);
}

// Every mode but chat
static void run_raw(App *app, Bytes text) {
    const Engine *e = &app->engine;
    Request r = {.ending = TURN_ENDED};
    Buffer lines = {0};
    encode_text(app, text, &app->prompt);
    if (interrupted) return;
    check_length(app, text.n);
    give_notices(app);
    r.ids = app->prompt;
    if (e->mode == GENERATE) {
        respond(app);
    } else if (e->mode == TOKENIZE && app->options.verbose) {
        for (size_t i = 0; i < r.ids.n; i++) {
            buffer_print(&lines, "%d ", r.ids.p[i]);
            buffer_add_json(&lines, e->tokenizer.text[r.ids.p[i]]);
            buffer_add(&lines, bytes("\n"));
        }
    } else {
        if (e->mode != TOKENIZE) run_request(app, &r);
        if (r.ending == TURN_ENDED) add_result(&lines, e, &r, NULL);
    }
    write_stdout(bytes_of(&lines));
    free(lines.p);
    free(r.scores);
}

// ------------------------------------------------------------------------------------------------
// JSON (RFC 8259). Each json_take...() returns true and moves past something if that comes next.

typedef struct {
    Bytes rest;             // what has not been read
    size_t n;               // bytes of the whole line
    const char *error;      // or NULL: after an error nothing is taken any more
    Buffer *text;           // the last string
    const uint8_t *string;  // where it begins
} Json;

// Unless `good`, what comes next is an error: `part` of the line is bad; NULL: it is no JSON.
static void json_check(Json *j, bool good, const char *part, const char *expected) {
    static char what[256];
    if (good || j->error) return;
    const char *found = !j->rest.n ? "the end" : !*j->rest.p ? "a NUL" : "";
    const char *hint = j->rest.n || part ? "" : " (one value a line: jq -c . makes that)";
    snprintf(what, sizeof(what), "bad %s at byte %zu, expected %s, found %s%.*s%s",
             part ? part : "JSON", j->n - j->rest.n + 1, expected, found,
             (int)min_size(j->rest.n, 16), j->rest.p, hint);
    j->error = what;
}

static void json_need(Json *j, bool taken, const char *what) { json_check(j, taken, NULL, what); }

// If a word is cut by the end, the end is what comes next.
static bool json_take(Json *j, const char *word) {
    const size_t n = strlen(word), there = min_size(n, j->rest.n);
    if (j->error || !there || memcmp(j->rest.p, word, there) != 0) return false;
    j->rest = bytes_from(j->rest, there);
    return there == n;
}

static bool json_take_any(Json *j, const char *set) {  // one or more bytes of a set
    const size_t before = j->rest.n;
    while (!j->error && j->rest.n && memchr(set, *j->rest.p, strlen(set)))
        j->rest = bytes_from(j->rest, 1);
    return j->rest.n < before;
}

static bool json_take_token(Json *j, const char *word) {  // perhaps after white space
    json_take_any(j, " \t\r\n");
    return json_take(j, word);
}

// What the next byte of a string, or an escape, stands for: a character, or half of one (UTF-16)
static int json_char(Json *j) {
    static const char names[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    char s[7] = "";
    const size_t n = min_size(j->rest.n, 6);
    memcpy(s, j->rest.p, n);
    const bool escape = s[0] == '\\', plain = !escape && (uint8_t)s[0] >= ' ';
    const size_t digits = escape && s[1] == 'u' ? strspn(s + 2, "0123456789abcdefABCDEF") : 0;
    const char *name = escape && s[1] ? strchr(names, s[1]) : NULL;
    const bool unit = digits == 4, cut = escape && (n == 1 || (n == digits + 2 && s[1] == 'u'));
    j->rest = bytes_from(j->rest, unit || cut ? n : name ? 2 : plain);
    json_need(j, plain || unit || name, "a string's character, or an escape as in \\n or \\u00e9");
    if (unit) return (int)strtol(s + 2, NULL, 16);
    return name ? meant[name - names] : BAD_BYTE + (uint8_t)s[0];
}

static bool json_take_string(Json *j) {
    json_take_any(j, " \t\r\n");
    j->string = j->rest.p;
    if (!json_take(j, "\"")) return false;
    j->text->n = 0;
    for (int c, before = 0; !j->error && !json_take(j, "\""); before = c) {
        c = json_char(j);
        if (before >= 0xD800 && before < 0xDC00 && c >= 0xDC00 && c < 0xE000) {
            c += 0x10000 + ((before - 0xD800) << 10) - 0xDC00;
            j->text->n -= 3;  // the first half, taken for a whole
        }
        add_char(j->text, c >= 0xD800 && c < 0xE000 ? 0xFFFD : c);
    }
    return true;
}

static bool json_take_number(Json *j) {
    static const char digits[] = "0123456789";
    json_take(j, "-");
    if (!json_take(j, "0") && !json_take_any(j, digits)) return false;
    if (json_take(j, ".") && !json_take_any(j, digits)) return false;
    if (!json_take(j, "e") && !json_take(j, "E")) return true;
    if (!json_take(j, "+")) json_take(j, "-");
    return json_take_any(j, digits);
}

// Goes on to the next value of an array, or of an object, whose key is in j->text then. False: its
// `end` comes first, and is taken.
static bool json_next(Json *j, const char *end, bool first) {
    if (json_take_token(j, end)) return false;
    json_need(j, first || json_take(j, ","), *end == '}' ? ", or }" : ", or ]");
    json_need(j, *end == ']' || (json_take_string(j) && json_take_token(j, ":")), "\"KEY\":");
    json_take_token(j, "");
    return !j->error;
}

// Moves past a value, which must be there, inside of `depth` others.
static void json_value(Json *j, int depth) {
    if (json_take_string(j)) return;
    const char *end = json_take(j, "{") ? "}" : json_take(j, "[") ? "]" : NULL;
    json_need(j, !end || depth < 100, "at most 100 levels");
    for (int i = 0; end && json_next(j, end, i == 0); i++) json_value(j, depth + 1);
    json_need(j, end || json_take(j, "true") || json_take(j, "false") || json_take(j, "null") ||
                 json_take_number(j), depth ? "a value" : "a value (-l: plain lines)");
}

// Goes to the value of an object's last member of this name. If there is none, nothing is left.
static Json json_member(Json object, const char *name) {
    Json found = {.text = object.text};
    json_take_token(&object, "{");
    for (int i = 0; json_next(&object, "}", i == 0); i++) {
        if (bytes_are(bytes_of(object.text), name)) found = object;
        json_value(&object, 1);
    }
    return found;
}

// Adds a message to `talk` and returns its role.
static int json_message(Json *j, Conversation *talk) {
    static const char *const roles[] = {"system", "user", "assistant"};  // as in their enum
    Json name = json_member(*j, "role"), content = json_member(*j, "content");
    int role = json_take_string(&name) ? ASSISTANT : -1;
    while (role >= 0 && !bytes_are(bytes_of(j->text), roles[role])) role--;
    json_check(j, *j->rest.p == '{', "text or messages",
               "a message, {\"role\": ..., \"content\": ...}");
    json_check(j, role >= 0, "role", "system, user or assistant");
    json_check(j, json_take_string(&content), "content", "a string");
    conversation_add(talk, role, bytes_of(j->text));
    json_value(j, 0);
    return role;
}

// Goes to the text or the messages of an object. Its other members go to `out`, each with a comma.
static void json_object(Json *j, int kind, Buffer *out) {
    static char what[128];
    const Bytes text = json_member(*j, "text").rest, talk = json_member(*j, "messages").rest;
    Json all = *j;
    json_take(&all, "{");
    buffer_add(out, bytes("{"));
    for (int i = 0; json_next(&all, "}", i == 0); i++) {
        const uint8_t *member = all.string;
        const Bytes name = bytes_of(j->text);
        const char *const *added = members[kind];
        while (*added && !bytes_are(name, *added)) added++;
        const bool kept = !*added && !bytes_are(name, "text") && !bytes_are(name, "messages");
        if (*added) {
            snprintf(what, sizeof(what), "has a member \"%s\", which this run adds; to take it "
                     "away: jq 'del(.%s)' -c", *added, *added);
            j->error = what;
        }
        json_value(&all, 1);
        if (kept) buffer_add(out, (Bytes){member, all.rest.p - member});
        if (kept) buffer_add(out, bytes(","));
    }
    json_check(j, text.n ? !talk.n && *text.p == '"' : talk.n && *talk.p == '[', "text or messages",
               "one of \"text\": \"...\" and, in chat, \"messages\": [...]");
    if (!j->error) j->rest = text.n ? text : talk;
}

// Parses one line. A string goes to j->text; an array of messages goes to `talk`, unless that is
// NULL. Their system message, which is the first one, replaces that of `talk`. See json_object.
static void json_line(Json *j, Conversation *talk, int kind, Buffer *out) {
    json_take_token(j, "");
    json_check(j, j->rest.n > 0, "JSON", "a value");  // a blank line gets no hint
    const Json start = *j;
    json_value(j, 0);
    json_take_token(j, "");
    json_need(j, j->rest.n == 0, "the end of the line");
    if (j->error) return;
    *j = start;
    if (*j->rest.p == '{') json_object(j, kind, out);
    const bool messages = talk && json_take(j, "[");
    int role = messages ? -1 : USER;
    for (int i = 0; messages && json_next(j, "]", i == 0); i++) {
        role = json_message(j, talk);
        json_check(j, role != SYSTEM || i == 0, "role", "a system message only at the start");
        if (role == SYSTEM) conversation_drop(talk, 0, talk->n - 1);
    }
    json_check(j, messages || json_take_string(j), "text or messages",
               talk ? "a string, an array of messages or an object (-l: plain lines)"
                    : "a string or an object (-l: plain lines)");
    json_check(j, role == USER, "role", "a message of the user as the last one");
}

// ------------------------------------------------------------------------------------------------
// Lists: -l and -L. Many texts run together: each is a line of the list, its answer of the output.

enum { AHEAD = 1024, AHEAD_BYTES = 16 << 20 };  // lines that may wait for an earlier one

typedef struct {
    App *app;
    Engine *e;              // the app's
    Lines in;
    bool ended;             // there are no more lines
    bool failed;            // a line was an error
    size_t read;            // lines so far: read,
    size_t done;            // answered or known to be wrong,
    size_t written;         // and written
    Request requests[AHEAD];  // that of line i is at i % AHEAD; done, its line has its newline
    size_t prompts;         // their tokens
    size_t endings[FAILED + 1];  // answers by their end
    size_t thinking;        // answers that ended inside thinking
    size_t closed;          // thinkings that -r N ended
    size_t pieces;          // texts that are scored in pieces
    double size;            // bytes of the file, if known
    double consumed;        // bytes of its lines so far
    size_t there;           // of -w: lines that FILE had
    Buffer last;            // the last of them
    Buffer cut;             // what follows it without a newline
} List;

static bool has_newline(Bytes line) { return line.n && line.p[line.n - 1] == '\n'; }

// A request is done, or can't run. Writes all done lines that follow those that are written.
static void end_line(List *l, Request *r, const char *error) {
    const bool terminal = is_terminal(STDOUT_FILENO);
    if (error) report("%.600s: line %zu: %s", l->in.name, r->number + 1, error);
    l->failed |= error != NULL;
    l->done++;
    add_result(&r->line, l->e, r, error);
    for (; !interrupted; l->written++) {
        Buffer shown = {0};
        r = &l->requests[l->written % AHEAD];
        if (!has_newline(bytes_of(&r->line))) break;
        if (terminal) progress_end();
        if (terminal) add_printable(&shown, bytes_of(&r->line), true);
        write_stdout(bytes_of(terminal ? &shown : &r->line));
        free(shown.p);
        free(r->line.p);
        free(r->scores);
        free(r->ids.p);
        *r = (Request){0};
    }
}

// Encodes a line. Of an object, the members that it keeps go to `out`. Returns what is wrong with
// the line, or NULL; after Ctrl-C these may not be all ids.
static const char *encode_line(List *l, Bytes line, Ids *ids, Buffer *out) {
    App *app = l->app;
    const Engine *e = l->e;
    const Options *o = &app->options;
    const bool chat = e->mode == CHAT;
    const Bytes before = bytes(o->text ? o->text : "");
    Conversation *talk = &app->conversation;  // its messages, or its text as one
    Json j = {.rest = line, .n = line.n, .text = &app->input};
    size_t size = 0, own = 1;  // own: bytes of a line that is a text
    if (line.n + before.n > MOST_BYTES) return "too long, expected less than 2 GB";
    conversation_drop(talk, 0, talk->n);
    if (chat && o->system) conversation_add(talk, SYSTEM, bytes(o->system));
    if (o->json_list) json_line(&j, chat ? talk : NULL, result_kind(e), out);
    if (j.error) return j.error;
    if (!talk->n || talk->p[talk->n - 1].role != USER) {  // these are no messages
        Buffer *text = &conversation_add(talk, USER, before)->text;
        if (o->text) buffer_add(text, bytes("\n\n"));
        const Bytes its = o->json_list ? bytes_of(j.text) : line;
        buffer_add(text, its);
        own = its.n;
    }
    for (size_t i = 0; i < talk->n; i++)  // an earlier answer may lose its thinking
        size += talk->p[i].role == ASSISTANT ? 0 : talk->p[i].text.n;
    if (e->mode != TOKENIZE && e->mode != PERPLEXITY &&
        size / 4 > e->tokenizer.tables->longest * e->model.state.seq_len)  // NFC may quarter it
        return wrong_length(app, size, size, " bytes");
    if (chat) render(&e->tokenizer, talk, 0, app->switched_on, ids);
    else encode_text(app, bytes_of(&talk->p[0].text), ids);
    return interrupted ? NULL : wrong_length(app, own, ids->n, "");
}

// Reads a line: its texts wait to run, or it is done at once, as it is bad or just tokenized.
static void add_line(List *l, Bytes line) {
    App *app = l->app;
    Request *r = &l->requests[l->read % AHEAD];
    give_notices(app);
    if (l->read == l->there && draws_ids(l->e) && !quiet && !app->options.seeded)
        fprintf(stderr, "seed %llu\n", app->options.seed);
    r->number = l->read;
    r->rng = app->options.seed + r->number;
    const char *error = encode_line(l, chop(line), &r->ids, &r->line);
    if (interrupted) return;
    l->read++;
    l->consumed += line.n;
    if (!error) l->prompts += r->ids.n;
    if (error || l->e->mode == TOKENIZE) {
        end_line(l, r, error);
    } else {
        start_request(l->e, r);
        l->pieces += r->texts > 1;
    }
}

// Shows the progress. The work that is done: texts, and of those that run the tokens, in texts of
// as many tokens as those that have ended had.
static void show_texts(const List *l) {
    const Engine *e = l->e;
    const double lines = l->ended ? l->read : floor(l->size * l->read / fmax(l->consumed, 1));
    const double all = fmax(lines - l->there, 0);
    double running = 0;  // their tokens so far
    char of_all[64] = "", text[128];
    for (int i = 0; i < e->n_active; i++)
        running += fmax(0, (double)e->active[i]->run - e->active[i]->cached);
    const double work = l->done + l->done * running / fmax(e->rows - running, 1);
    const double part = l->done && all > 0 ? fmin(work / all, 1) : 0;
    if (all > 0)
        snprintf(of_all, sizeof(of_all), " of %s%.0f", l->ended ? "" : "about ", all);
    snprintf(text, sizeof(text), "%zu%s texts, %d running", l->done, of_all, e->n_running);
    progress_show(e->rows, part, text);
}

// Reads lines and adds their texts while there are places. While texts run, it does not wait for
// lines that another program has still to write. False: all is done, or Ctrl-C.
static bool admit_lines(List *l) {
    for (Bytes line;;) {
        size_t ahead = 0;  // bytes of lines that wait for an earlier one
        show_texts(l);
        for (size_t i = l->written; i < l->read; i++) {
            Request *r = &l->requests[i % AHEAD];
            ahead += r->line.n;
            if (!add_texts(l->e, r)) continue;  // there are too few places
            free(r->ids.p);
            r->ids = (Ids){.n = r->ids.n};      // the number of tokens is needed later
        }
        if (l->ended || l->e->n_active == l->e->n_places || l->read - l->written == AHEAD ||
            ahead > AHEAD_BYTES || interrupted)
            break;
        l->ended = !next_line(&l->in, &line, l->e->n_active == 0);
        if (line.n == 0) break;  // the end, or it comes later
        add_line(l, line);
    }
    return l->e->n_active > 0 && !interrupted;
}

// The lines of the texts that have ended
static void write_ended(List *l) {
    for (Text *t; (t = find_ended(l->e));) {
        Request *r = t->request;
        const bool thinking = t->writer->thinking;
        writer_end(t->writer);
        l->closed += r->ended == 0 && t->closed;
        if (!end_text(l->e, t)) continue;
        l->endings[r->ending]++;
        l->thinking += thinking;
        end_line(l, r, r->ending != FAILED ? NULL : l->e->mode == EMBED ? BAD_VECTOR : NOT_FINITE);
    }
}

// Could a list with results of this kind have written a line, or the beginning of one that was cut?
static bool looks_written(int kind, Bytes line) {
    static const struct { const char *begin, *rest; } looks[] = {  // rest: NULL is JSON
        [N_MODES] = {"{", NULL},
        [CHAT] = {"\"", NULL}, [GENERATE] = {"\"", NULL}, [EMBED] = {"[", NULL},
        [TOKENIZE] = {"", "0123456789 "}, [PERPLEXITY] = {"tokens ", "tokens nlp 0123456789.inf-"}};
    const bool object = *line.p == '{', null = *line.p == 'n', whole = has_newline(line);
    const char *begin = null ? "null" : object ? "{" : looks[kind].begin, *rest = looks[kind].rest;
    Buffer text = {0};
    Json j = {.rest = chop(line), .text = &text};
    const Json start = j;
    if (memcmp(line.p, begin, min_size(j.rest.n, strlen(begin))) != 0) return false;
    if (rest && !object && !null) json_take_any(&j, rest);
    else json_value(&j, 0);
    const bool added = !object || j.error || json_member(start, members[kind][0]).rest.n > 0;
    free(text.p);
    return added && j.rest.n == 0 && !(whole && j.error);
}

// Opens the list. With -w, FILE takes the place of stdout, and its last lines are found.
static List *open_list(App *app) {
    static List list;
    const Options *o = &app->options;
    const char *name = o->list ? o->list : o->json_list, *file = o->out;
    const unsigned type = file ? file_mode(file) : 0;
    List *l = &list;
    *l = (List){.app = app, .e = &app->engine};
    l->in = (Lines){.fd = file_open(name, false), .name = strcmp(name, "-") ? name : "stdin"};
    if (l->in.fd < 0) die("%s: %s", l->in.name, strerror(errno));
    l->size = file_size(l->in.fd);
    if (!file && same_file(l->in.fd, STDOUT_FILENO))
        die("%s: is the list and stdout, expected another FILE", l->in.name);
    if (!file) return l;
    if (type && !S_ISREG(type)) die("%s: not a regular file, expected one or a new name", file);
    Lines in = {.fd = file_open(file, true), .name = file};
    if (in.fd < 0) die("%s: %s", file, strerror(errno));
    if (!file_lock(in.fd, true)) die("%s: in use by another run, expected another FILE", file);
    if (!file_lock(l->in.fd, false)) die("%s: is the list, expected another FILE", file);
    for (Bytes line; next_line(&in, &line, true); l->there += has_newline(line)) {
        Buffer *end = has_newline(line) ? &l->last : &l->cut;
        if (line.n > MOST_BYTES) die("%s: a line is too long, expected less than 2 GB", file);
        end->n = 0;
        buffer_add(end, line);
    }
    free(in.data.p);
    if (dup2(in.fd, STDOUT_FILENO) < 0) die("%s: %s", file, strerror(errno));
    stdout_name = file;
    return l;
}

// Skips the lines whose results FILE has, and takes off its cut line. False: nothing is left to do.
static bool skip_lines(List *l) {
    const char *file = l->app->options.out;
    const size_t there = l->there, cut = l->cut.n;
    size_t n = 0;
    if (there + cut == 0) return true;
    if ((there && !looks_written(result_kind(l->e), bytes_of(&l->last))) ||
        (cut && !looks_written(result_kind(l->e), bytes_of(&l->cut))))
        die("%s: does not end as this list's lines do, expected another FILE", file);
    for (Bytes line; n <= there && next_line(&l->in, &line, true); n++) {
        if (n < there) l->consumed += line.n;
        else l->in.end -= line.n;  // it comes again
    }
    if (n < there + (cut > 0))
        die("%s: has more lines than the list, expected at most %zu", file, n);
    if (n == there)
        notice("%s: has all %zu lines; another FILE, or none, makes a new run", file, n);
    if (n == there) return false;
    if (cut && ftruncate(STDOUT_FILENO, (off_t)(file_size(STDOUT_FILENO) - cut)) != 0)
        die("%s: %s", file, strerror(errno));
    l->read = l->written = there;
    notice("%s: %zu lines are there, goes on with line %zu", file, there, there + 1);
    return true;
}

// Notices and statistics at the end
static int list_end(const List *l) {
    const Options *o = &l->app->options;
    const double seconds = now() - progress.start + 1e-9;
    const double rate = (l->prompts - l->e->cached + l->e->drawn) / seconds;
    const unsigned long long first = o->seed + l->there, next = o->seed + l->written;
    const int context = l->app->engine.model.state.seq_len, most = o->n;
    const size_t limited = l->endings[LIMIT_REACHED], full = l->endings[CONTEXT_ENDED];
    const bool answers = l->e->mode <= GENERATE, draws = draws_ids(l->e);
    const int status = interrupted ? EXIT_INTERRUPT : l->failed ? EXIT_FAILURE : EXIT_SUCCESS;
    char seed[48] = "";  // which the same command would not have
    if (draws && !o->seeded && l->e->places->sampler.temperature != 0)
        snprintf(seed, sizeof(seed), "%s -s %llu", o->out ? " with" : " and", o->seed);
    progress_end();
    if (quiet) return status;
    if (limited) notice("answers: ended by -n after %d tokens: %zu", most, limited);
    if (full) notice("answers: ended by a full context of %d tokens (-c): %zu", context, full);
    if (l->closed) notice("answers: their thinking was ended (-r): %zu", l->closed);
    if (l->thinking) notice("answers: ended inside their thinking: %zu", l->thinking);
    if (l->pieces) notice("texts: scored in pieces of %d tokens (-c): %zu", context, l->pieces);
    if (interrupted)
        notice("list: %zu lines are written; the same command%s%s goes on%s", l->written,
               o->out ? "" : " with -w FILE for > FILE", seed,
               l->size ? "" : ", if the pipe gives the same lines again");
    fprintf(stderr, "%zu texts in %.1f s, prompts %zu tokens (%zu cached", l->written - l->there,
            seconds, l->prompts, l->e->cached);
    if (l->e->again) fprintf(stderr, ", %zu computed again", l->e->again);
    fputs(")", stderr);
    if (answers) fprintf(stderr, ", answers %zu tokens", l->e->drawn);
    fprintf(stderr, ", %.*f tokens/s", rate < 999.95, rate);
    if (draws && l->written > l->there) fprintf(stderr, ", seeds %llu to %llu", first, next - 1);
    fputc('\n', stderr);
    return status;
}

static int run_list(List *l) {
    progress = (struct Progress){.start = now()};
    if (!skip_lines(l)) return EXIT_SUCCESS;
    patience = 0;
    while (admit_lines(l) && run_pass(l->e)) {
        draw_all(l->e);
        write_ended(l);
    }
    return list_end(l);
}

// ------------------------------------------------------------------------------------------------
// Options and main: what the command line says, and what it leads to

static const char usage[] =  // after the line of --version
    "Runs Qwen3 language models.\n"
    "\n"
    "usage: qwen3 MODEL [options]      MODEL is a .bin file made by export.py\n"
    "\n"
    "  -i TEXT    the prompt; without -i and -f a terminal chats; a pipe is a prompt\n"
    "  -f FILE    the prompt is FILE's text (- is stdin), after -i and an empty line\n"
    "  -l FILE    a list: each line of FILE (- is stdin) is a text, each answer a line\n"
    "  -L FILE    the same, where a line is JSON: a text, an array of messages, or an\n"
    "             object with \"text\" or \"messages\", which comes back with the answer\n"
    "  -w FILE    the list's answers go to FILE; after a cut the same command goes on\n"
    "  -m MODE    chat, generate (raw completion), embed, tokenize or perplexity\n"
    "             [what the model is made for: mostly chat]\n"
    "  -y TEXT    system prompt (chat) [none]\n"
    "  -r 0|1|N   thinking off, on, or on for at most N tokens (chat) [0]\n"
    "  -o TEXT|TEXT...  how likely each of these answers is; the likeliest is written\n"
    "  -t FLOAT   temperature, 0 is greedy [the checkpoint's; without thinking 0.7]\n"
    "  -p FLOAT   top-p, above 0 and up to 1 [the checkpoint's; without thinking 0.8]\n"
    "  -k INT     top-k, 0 is off [the checkpoint's; without thinking 20]\n"
    "  -a FLOAT   presence penalty on tokens already generated, 0 to 2 [0]\n"
    "  -e FLOAT   repetition penalty, 1 is off [the checkpoint's]\n"
    "  -x TEXT    end the answer before TEXT (chat, generate) [none]\n"
    "  -s INT     random seed, 64 bits [from the clock, below 1000000]\n"
    "  -n INT     at most so many new tokens per answer, -1 is no limit [-1]\n"
    "  -c INT     context in tokens, 0 is the model's [what a quarter of the memory\n"
    "             holds, at least 4096, at most the model's; perplexity 4096]\n"
    "  -b INT     prompt tokens per pass, 1 to 512; never changes the output [512]\n"
    "  -j INT     threads; never changes the output [all cores this process may use]\n"
    "  -q         nothing on stderr but errors\n"
    "  -v         also the prompt's ids; with -m tokenize, a line for each token\n"
    "  -h, --version\n"
    "\n"
    "A prompt from both: ls -l | qwen3 model.bin -i \"Which file is the largest?\" -f -\n"
    "-m chat on a pipe is a conversation, one turn a line. The model's text goes to\n"
    "stdout, all else to stderr. Exit: 0 success, 1 file, memory or model error,\n"
    "2 usage error, 130 Ctrl-C.\n";

typedef struct {
    char letter;
    enum { TEXT, MODE, INTEGER, REAL, SEED } type;
    size_t place;           // in Options
    double low;             // the least value; of a TEXT, number of bytes
    double high;            // the greatest
    const char *expected;   // what the value should be; NULL: a number from low to high
    const char *others[2];  // what other programs call it
} Option;

#define PLACE(name) offsetof(Options, name)
enum { LONGEST_PATH = 4000 };

static const Option options[] = {  // those with a value
    {'i', TEXT, PLACE(text), 0, INT_MAX, NULL, {"--prompt"}},
    {'f', TEXT, PLACE(file), 1, LONGEST_PATH, "a file's name, or -", {"--file"}},
    {'l', TEXT, PLACE(list), 1, LONGEST_PATH, "a file's name, or -", {"--json"}},
    {'L', TEXT, PLACE(json_list), 1, LONGEST_PATH, "a file's name, or -", {NULL}},
    {'w', TEXT, PLACE(out), 1, LONGEST_PATH, "a file's name", {NULL}},
    {'m', MODE, PLACE(mode), 0, N_MODES - 1,
     "chat, generate, embed, tokenize or perplexity (MODEL goes without -m)", {NULL}},
    {'y', TEXT, PLACE(system), 0, INT_MAX, NULL, {"--system-prompt", "--system"}},
    {'r', INTEGER, PLACE(think), 0, INT_MAX, NULL, {NULL}},
    {'o', TEXT, PLACE(answers), 0, INT_MAX, NULL, {NULL}},
    {'t', REAL, PLACE(temperature), 0, 1000, NULL, {"--temp", "--temperature"}},
    {'p', REAL, PLACE(top_p), 1e-30, 1, "above 0 and up to 1 (a prompt goes with -i)", {"--top-p"}},
    {'k', INTEGER, PLACE(top_k), 0, INT_MAX, NULL, {"--top-k"}},
    {'a', REAL, PLACE(presence), 0, 2, NULL, {"--presence-penalty"}},
    {'e', REAL, PLACE(repetition), 0.01, 100, NULL, {"--repeat-penalty"}},
    {'x', TEXT, PLACE(stop), 1, INT_MAX, "a text that is not empty", {"--reverse-prompt"}},
    {'s', SEED, PLACE(seed), 0, INT_MAX, "a 64-bit integer", {"--seed"}},
    {'n', INTEGER, PLACE(n), -1, INT_MAX, NULL, {"--n-predict", "--predict"}},
    {'c', INTEGER, PLACE(context), 0, INT_MAX, NULL, {"--ctx-size"}},
    {'b', INTEGER, PLACE(batch), 1, 512, NULL, {"--batch-size"}},
    {'j', INTEGER, PLACE(threads), 1, 1024, NULL, {"--threads"}},
};

// The option that an argument is. If it is none, that ends the program, with the likely mistake.
static const Option *option_named(const char *arg, const char *model) {
    const size_t n = strcspn(arg, "=");
    for (size_t i = 0; i < 2 * sizeof(options) / sizeof(*options); i++) {
        const char letter = options[i / 2].letter, *other = options[i / 2].others[i % 2];
        const bool begins = arg[0] == '-' && arg[1] == letter;
        if (begins && !arg[2]) return &options[i / 2];
        if (begins && isdigit((uint8_t)arg[2]))
            die_usage("%.80s: unknown option, expected a space: -%c %.80s", arg, letter, arg + 2);
        if (other && strlen(other) == n && !strncmp(arg, other, n))
            die_usage("%.80s: unknown option, expected -%c; -h lists all", arg, letter);
    }
    if (arg[0] == '-')
        die_usage("%.80s: unknown option, expected one that -h lists%s", arg,
                  !strncmp(arg, "-ng", 3) ? " (all runs on the CPU)"
                  : strstr(arg, "-model") ? " (MODEL without an option)" : "");
    if (!strcmp(model, "run"))
        die_usage("run: unexpected, there are no commands: qwen3 MODEL (a .bin file)");
    if (strlen(arg) > 4 && !strcmp(arg + strlen(arg) - 4, ".bin"))
        die_usage("%.80s: a second model, expected one, found \"%.99s\" before it", arg, model);
    die_usage("%.80s: unexpected, as MODEL is \"%.99s\"; a prompt goes with -i, in quotes: "
              "-i \"%.80s\"", arg, model, arg);
}

// Sets an option, or ends the program if it can't have this value, or has none.
static void set_option(Options *o, const Option *option, const char *value) {
    if (!value) die_usage("-%c: alone, expected a value after it", option->letter);
    void *place = (char *)o + option->place;
    char range[64], *end = NULL;
    double number = strlen(value);
    errno = 0;
    if (option->type == TEXT) {
        *(const char **)place = value;
    } else if (option->type == MODE) {
        for (number = 0; number < N_MODES && strcmp(value, mode_names[(int)number]);) number++;
    } else if (option->type == INTEGER) {
        number = strtoll(value, &end, 10);
    } else if (option->type == REAL) {
        number = strtod(value, &end);
    } else {
        o->seed = *value == '-' ? (uint64_t)strtoll(value, &end, 10) : strtoull(value, &end, 10);
        o->seeded = true;
    }
    snprintf(range, sizeof(range), "%.10g to %.10g", option->low, option->high);
    const bool in_range = number >= option->low && number <= option->high;
    if (!in_range || end == value || (end && *end) || (option->type == SEED && errno))
        die_usage("-%c: bad value, expected %s, found \"%.80s\"", option->letter,
                  option->expected ? option->expected : range, value);
    if (option->type == REAL) *(float *)place = (float)number;
    if (option->type == MODE || option->type == INTEGER) *(int *)place = (int)number;
}

// Finds the TEXTs of -o, if it is given, and checks whether it can have an effect.
static void split_answers(Options *o) {
    size_t cap = 0;
    for (const char *text = o->answers; text; o->n_choices++) {
        const size_t n = strcspn(text, "|");
        const Bytes choice = {(const uint8_t *)text, n};
        if (n == 0) die_usage("-o: an empty answer, expected TEXT|TEXT...");
        for (int i = 0; i < o->n_choices; i++) {
            if (bytes_equal(o->choices[i].text, choice))
                die_usage("-o: the answer %.*s twice, expected different ones", (int)n, text);
        }
        o->choices = grow(o->choices, &cap, o->n_choices, 1, sizeof(Choice));
        o->choices[o->n_choices] = (Choice){.text = choice};
        text = text[n] ? text + n + 1 : NULL;
    }
    if (o->n_choices == 0) return;
    if (o->n_choices == 1) die_usage("-o: one answer, expected several: TEXT|TEXT...");
    if (o->mode > GENERATE) die_usage("-o: -m %s has no answers", mode_names[o->mode]);
    if (o->stop) die_usage("-o, -x: both given, expected one of them");
    if (!o->text && !o->file && !is_list(o))
        die_usage("-o: a conversation, expected -i TEXT, -f FILE, a list or a pipe");
}

// Only chat can begin without a text.
static void check_text(const Options *o, int mode) {
    if (mode > CHAT && !o->text && !o->file && !is_list(o))
        die_usage("-m %s: no text, expected -i TEXT, -f FILE or a pipe", mode_names[mode]);
}

static Options parse_options(int argc, char **argv) {
    Options o = {.mode = -1, .think = -1, .temperature = -1, .top_p = -1, .top_k = -1, .n = -1,
                 .repetition = -1, .context = -1, .batch = 512, .threads = -1,
                 .seed = (uint64_t)(now() * 1e6) % 1000000};
    int given[256] = {0};
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        const bool help = !strcmp(arg, "-h") || !strcmp(arg, "--help") || !strcmp(arg, "-help");
        if (help || !strcmp(arg, "--version")) {
            write_stdout(bytes(version()));
            if (help) write_stdout(bytes(usage));
            exit(EXIT_SUCCESS);
        }
        if (arg[0] == '-' && arg[1] && !arg[2] && given[(uint8_t)arg[1]]++)
            die_usage("%s: given twice, expected once", arg);
        if (!strcmp(arg, "-q")) quiet = true;
        else if (!strcmp(arg, "-v")) o.verbose = true;
        else if (arg[0] != '-' && !o.model) o.model = arg;
        else set_option(&o, option_named(arg, o.model), argv[++i]);  // NULL after the last one
    }
    if (!o.model || !*o.model || strlen(o.model) > LONGEST_PATH)
        die_usage("MODEL: %s, expected a .bin file; -h shows more",
                  o.model && *o.model ? "too long" : "missing");
    if (quiet && o.verbose) die_usage("-q, -v: both given, expected one of them");
    if (is_list(&o) && (o.file || o.verbose || (o.list && o.json_list)))
        die_usage("-l, -L: a list, expected one of them, without -f and -v");
    if (o.out && (!is_list(&o) || !strcmp(o.out, "-")))
        die_usage("-w: expected a file's name, and -l or -L");
    if (!o.text && !o.file && o.mode != CHAT && !is_terminal(STDIN_FILENO)) o.file = "-";
    check_text(&o, o.mode);
    split_answers(&o);
    return o;
}

// Reads the prompt. False: there is none, this is a conversation.
static bool read_prompt(App *app) {
    const Options *o = &app->options;
    Buffer *text = &app->input;
    const bool chat = app->engine.mode == CHAT, piped = o->file && !strcmp(o->file, "-");
    check_text(o, app->engine.mode);
    if (o->text) buffer_add(text, bytes(o->text));
    if (!o->file) return o->text;
    if (o->text) buffer_add(text, bytes("\n\n"));
    const size_t before = text->n;
    const char *error = file_read(text, o->file);
    if (error) die("%s: %s", piped ? "stdin" : o->file, error);
    if (chat && piped && text->n == before)
        die("stdin: empty, expected a prompt; has a command before the pipe failed?");
    if (chat) text->n = before + chop(bytes_from(bytes_of(text), before)).n;
    return true;
}

// Sets what the options say of answers: their length, their thinking, given ones.
static void prepare_answers(App *app) {
    const Options *o = &app->options;
    Engine *e = &app->engine;
    e->max_new = o->n;
    e->choices = o->choices;
    e->n_choices = o->n_choices;
    e->budget = o->think > 1 ? o->think : INT_MAX;
    find_thinking(app);
    encode_part(&e->tokenizer, bytes(closing), true, &e->closing);
    encode_part(&e->tokenizer, bytes("\n\n"), true, &e->blank);
    encode_choices(e);
}

static void load_model(App *app) {
    const Options *o = &app->options;
    Engine *e = &app->engine;
    const Config *c = &e->model.config;
    const char *path = o->model, *slash = strchr(path, '/');  // a model's name on the hub has one
    bool named = slash && !strchr(slash + 1, '/') && !strchr("./~", *path) && !strstr(path, ".bin");
    const unsigned mode = file_mode(path);
    char file[4096];
    snprintf(file, sizeof(file), "%s.bin", path);
    if (!S_ISREG(mode) && file_mode(file)) die("%s: no model, expected %s", path, file);
    if (S_ISDIR(mode)) die_export(path, "a directory", INT_MAX, path);
    if (named && !mode) die_export(path, "not a file", INT_MAX, path);
    model_map(&e->model, path);
    snprintf(file, sizeof(file), "%s.tokenizer", path);
    if (!file_mode(file))
        die("%s: missing, expected beside the model, where export.py writes it", file);
    tokenizer_load(&e->tokenizer, file, c->vocab_size);
    e->mode = o->mode < 0 ? e->tokenizer.mode : (Mode)o->mode;
    const int least = e->mode == PERPLEXITY ? 2 : 1, most = c->max_seq_len;
    const double room = e->mode == PERPLEXITY ? 0 : memory_size() / 4 / position_size(c);
    const int fitting = (int)fmax(fmin(room, INT_MAX) / 1024, 4) * 1024;
    const int usual = o->context < 0 ? min_int(fitting, most) : most;
    const int context = o->context > 0 ? o->context : usual;
    if (context < least || context > most)
        die("-c: expected %d to %d (export.py --yarn raises it), found %d", least, most, context);
    if (e->mode == EMBED && o->n_choices)
        die_usage("-o: %s is an embedding model, expected one that answers", path);
    if (e->mode == TOKENIZE) return;
    start_threads(o->threads > 0 ? o->threads : cpu_count());
    // Logits that nobody needs take no memory. What is scored needs those of many rows.
    const int rows = min_int(e->mode == PERPLEXITY ? 128 : PLACES, o->batch);
    state_init(&e->model, context, o->batch, rows, is_list(o) ? min_int(PLACES, o->batch) : 1);
    prepare_answers(app);
}

static int run_mode(App *app) {
    const char *system = app->options.system;
    List *list = is_list(&app->options) ? open_list(app) : NULL;
    load_model(app);
    prepare_places(app);
    const bool chat = app->engine.mode == CHAT;
    if (chat && system) conversation_add(&app->conversation, SYSTEM, bytes(system));
    if (list) return run_list(list);
    const bool single = read_prompt(app);
    if (app->engine.mode != TOKENIZE) patience = 1;
    if (!single && is_terminal(STDIN_FILENO)) run_dialogue(app);
    else if (!single) run_script(app);
    else if (chat) chat_turn(app, bytes_of(&app->input));
    else run_raw(app, bytes_of(&app->input));
    return interrupted ? EXIT_INTERRUPT : EXIT_SUCCESS;
}

#ifndef TEST
int main(int argc, char **argv) {
    static App app;
    start_platform(&argc, &argv);
    app.options = parse_options(argc, argv);
    return run_mode(&app);
}
#endif

// ================================================================================================
// PART III. THE MACHINE
// ================================================================================================

#include <fcntl.h>
#include <pthread.h>
#ifdef _WIN32
#include <windows.h>
#else
#include <poll.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <termios.h>
#endif
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// ------------------------------------------------------------------------------------------------
// Vector math: loops that compilers vectorize

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define X86_SIMD
#endif

// Fused (rounded once) in the same builds as mul_add_v, so that both round alike
INLINE float mul_add(float a, float b, float c) {
#if defined(X86_SIMD) || defined(__ARM_FEATURE_DOTPROD)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// a if yes is 1, b if it is 0. Branch-free: GCC does not vectorize ?: where floats are compared.
INLINE float choose(int32_t yes, float a, float b) {
    return as_float((load_i32(&a) & -yes) | (load_i32(&b) & (yes - 1)));
}

// If |x| < 2^22, the float x + 1.5 * 2^23 has no bits left for a fraction. Read as an integer, it
// is 0x4B400000 + x, with x rounded to the nearest integer (ties to even), also if x < 0.
#define ROUNDER 12582912.0f

// exp(x) = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2; e^r is a polynomial (Cephes expf).
// exp(0) is exactly 1. For x < -87.7 the result is 0, as n = -127 makes the exponent's bits 0.
INLINE float fast_exp(float x) {
    float clamped = choose(x < -88.0f, -88.0f, choose(x > 88.0f, 88.0f, x));
    float shifted = mul_add(clamped, 1.44269504f, ROUNDER), n = shifted - ROUNDER;
    float r = mul_add(n, 2.12194440e-4f, mul_add(n, -0.693359375f, clamped));  // x - n ln 2
    float p = 1.9875691500e-4f;
    p = mul_add(p, r, 1.3981999507e-3f);
    p = mul_add(p, r, 8.3334519073e-3f);
    p = mul_add(p, r, 4.1665795894e-2f);
    p = mul_add(p, r, 1.6666665459e-1f);
    p = mul_add(p, r, 5.0000001201e-1f);
    p = mul_add(p, r * r, r) + 1;
    // The bits of `shifted` are 0x4B400000 + n. The shift by 23 drops the former and moves n + 127
    // into the exponent's place: the float is 2^n.
    return p * as_float(((uint32_t)load_i32(&shifted) + 127) << 23);
}

// Compares the bits of the floats as ints, because compilers vectorize that. Nonnegative floats
// have the order of their bits, negative ones the reverse: all their bits but the sign are flipped.
static float max_of(const float *x, int n) {
    int32_t max = INT32_MIN;
    for (int i = 0; i < n; i++) {
        const int32_t bits = load_i32(x + i);
        max = max_int(max, bits ^ (bits >> 31 & INT32_MAX));
    }
    return as_float(max ^ (max >> 31 & INT32_MAX));
}

static float max_abs(const float *x, int n) {
    int32_t max = 0;
    for (int i = 0; i < n; i++) max = max_int(max, load_i32(x + i) & INT32_MAX);
    return as_float(max);
}

// Shifted left by 13, exponent and fraction stand where a float has them. But an exponent e means
// 2^(e - 15), and there it is read as 2^(e - 127): hence the factor 2^112. The highest exponent, of
// infinity and NaN, becomes a float's highest.
INLINE float half_float(uint16_t half) {
    const uint32_t bits = (half & 0x7FFFu) << 13, sign = (half & 0x8000u) << 16;
    const float value = as_float(bits) * 0x1p112f;
    return as_float((uint32_t)load_i32(&value) | sign | (bits >= 0x0F800000 ? 0x7F800000 : 0));
}

static void *activations(size_t count, size_t size) {
    return alloc(count, size, "the activations (-b makes them smaller)");
}

static float *floats(size_t count) { return activations(count, sizeof(float)); }

// ------------------------------------------------------------------------------------------------
// SIMD primitives: a new instruction set provides these constants and functions. Elsewhere, only
// mul_add knows the CPU: it must be fused exactly where mul_add_v is. A vector is LANES floats or
// int32s, LANES is 4, 8 or 16 (an extension of GCC and clang: + - * and so on work lane by lane).
// tests/test.c has a portable version of each, as its definition.
//
//   dot4(acc, w, x)      acc + the sum of 4 products of bytes of w and x, in each lane
//   mul_add_v(a, b, c)   mul_add in each lane
//   zip_low, zip_high    a0 b0 a1 b1 ... of the first, or of the second, halves of a and b
//   add_pairs(a, b)      a0 + a1, a2 + a3, ..., b0 + b1, b2 + b3, ...
//   pick_levels(t, n)    byte n % 16 of t, which repeats the same 16 bytes, for each byte of n
//   load_halves(p)       LANES floats of 16 bits from p on
//
// Quantized x lies in -127 .. 127, so no partial sum overflows, even if a file's w holds -128. Some
// instructions take w as unsigned bytes: there W_BIAS = 128 is added to w, and bias_fix, which is
// -128 sum(x), to the sum: (w + 128) . x = w . x + 128 sum(x).
//
// A tile of a matrix product is TILE_VECS vectors of rows by TILE_TOKENS tokens, as many as fit
// into the registers. Plain C has vectors of 4, which every compiler makes for its CPU.

#if defined(X86_SIMD) && defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define USE_AVX512
#define SIMD "AVX-512 VNNI"
enum { LANES = 16, TILE_VECS = 2, TILE_TOKENS = 6, W_BIAS = 128 };
#elif defined(X86_SIMD)
#define USE_AVX2
#ifdef __AVXVNNI__
#define SIMD "AVX-VNNI"
enum { LANES = 8, TILE_VECS = 1, TILE_TOKENS = 6, W_BIAS = 128 };
#else
#define SIMD "AVX2"
enum { LANES = 8, TILE_VECS = 1, TILE_TOKENS = 4, W_BIAS = 0 };
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
#define USE_NEON
#define SIMD "NEON dotprod"
enum { LANES = 4, TILE_VECS = 2, TILE_TOKENS = 6, W_BIAS = 0 };
#else
#define SIMD "plain C"
enum { LANES = 4, TILE_VECS = 1, TILE_TOKENS = 4, W_BIAS = 0 };
#endif

enum { PANEL_ROWS = TILE_VECS * LANES };
enum { FLIP = W_BIAS ? (int32_t)0x80808080 : 0 };  // ^ FLIP adds W_BIAS to each byte

// UNROLL stands before loops over arrays of vectors, so that the arrays stay in registers.
#if defined(NO_UNROLL)  // with sanitizers, unrolled code takes minutes to compile
#define UNROLL
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float VecF __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t VecI __attribute__((vector_size(4 * LANES), may_alias));

#if defined(USE_AVX512)
INLINE VecI dot4(VecI acc, VecI w, VecI x) {
    return (VecI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}
INLINE VecF mul_add_v(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
INLINE VecI pick_levels(VecI table, VecI n) {
    return (VecI)_mm512_shuffle_epi8((__m512i)table, (__m512i)n & _mm512_set1_epi8(15));
}
#elif defined(USE_AVX2)
INLINE VecI dot4(VecI acc, VecI w, VecI x) {
#ifdef __AVXVNNI__
    return (VecI)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#else
    // w x = |w| (sign(w) x), as the first operand has no sign. Two products fit into an int16.
    __m256i u = _mm256_abs_epi8((__m256i)w), s = _mm256_sign_epi8((__m256i)x, (__m256i)w);
    __m256i pairs = _mm256_maddubs_epi16(u, s);
    return acc + (VecI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}
INLINE VecF mul_add_v(VecF a, VecF b, VecF c) { return _mm256_fmadd_ps(a, b, c); }
INLINE VecI pick_levels(VecI table, VecI n) {
    return (VecI)_mm256_shuffle_epi8((__m256i)table, (__m256i)n & _mm256_set1_epi8(15));
}
#elif defined(USE_NEON)
INLINE VecI dot4(VecI acc, VecI w, VecI x) {
    return (VecI)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)x);
}
INLINE VecF mul_add_v(VecF a, VecF b, VecF c) {
    return (VecF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE VecI pick_levels(VecI table, VecI n) {
    return (VecI)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)n & vdupq_n_u8(15));
}
#else
typedef int16_t Vec16 __attribute__((vector_size(4 * LANES), may_alias));
INLINE VecI dot4(VecI acc, VecI w, VecI x) {  // two products fit into an int16
    const Vec16 a = (Vec16)w, b = (Vec16)x;
    const VecI pairs = (VecI)((a << 8 >> 8) * (b << 8 >> 8) + (a >> 8) * (b >> 8));
    return acc + (pairs << 16 >> 16) + (pairs >> 16);
}
INLINE VecF mul_add_v(VecF a, VecF b, VecF c) { return a * b + c; }
INLINE VecI pick_levels(VecI table, VecI n) {
    uint8_t *at = (uint8_t *)&n;
    for (size_t i = 0; i < sizeof(n); i++) at[i] = ((uint8_t *)&table)[at[i] & 15];
    return n;
}
#endif

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (VecI){__VA_ARGS__})
#endif
#if defined(USE_AVX512)
#define ZIP(a, b, i) SHUFFLE(a, b, i, i + 16, i + 1, i + 17, i + 2, i + 18, i + 3, i + 19, \
    i + 4, i + 20, i + 5, i + 21, i + 6, i + 22, i + 7, i + 23)
#define EVERY_SECOND(a, b, i) SHUFFLE(a, b, i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14, \
    i + 16, i + 18, i + 20, i + 22, i + 24, i + 26, i + 28, i + 30)
#elif defined(USE_AVX2)
#define ZIP(a, b, i) SHUFFLE(a, b, i, i + 8, i + 1, i + 9, i + 2, i + 10, i + 3, i + 11)
#else
#define ZIP(a, b, i) SHUFFLE(a, b, i, i + 4, i + 1, i + 5)
#define EVERY_SECOND(a, b, i) SHUFFLE(a, b, i, i + 2, i + 4, i + 6)
#endif
INLINE VecI zip_low(VecI a, VecI b) { return ZIP(a, b, 0); }
INLINE VecI zip_high(VecI a, VecI b) { return ZIP(a, b, LANES / 2); }
INLINE VecI add_pairs(VecI a, VecI b) {
#if defined(USE_AVX2)  // fewer instructions than GCC makes of a shuffle
    return (VecI)_mm256_permute4x64_epi64(_mm256_hadd_epi32((__m256i)a, (__m256i)b), 0xD8);
#else
    return EVERY_SECOND(a, b, 0) + EVERY_SECOND(a, b, 1);
#endif
}

INLINE VecI splat(int32_t value) { return (VecI){0} + value; }

INLINE VecF splat_f(float value) { return value - (VecF){0}; }  // -0 + 0 would lose the sign

INLINE VecI load_vector(const void *p) {
    VecI value;
    memcpy(&value, p, sizeof(value));
    return value;
}

INLINE VecF load_halves(const uint16_t *p) {
#if defined(USE_AVX512)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(USE_AVX2)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(USE_NEON)
    return (VecF)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    return (VecF){half_float(p[0]), half_float(p[1]), half_float(p[2]), half_float(p[3])};
#endif
}

// ------------------------------------------------------------------------------------------------
// The KV cache
//
// The cache is a pool of blocks of LANES positions (the floats of a SIMD vector). A block has all
// layers and kv heads, so memory is touched only as positions come into use. It has, for each,
//
//   keys    (head_dim, LANES positions)
//   values  (value_dim / LANES, LANES positions, LANES columns)
//
// so that a vector of keys gives a vector of scores, one of values LANES columns of the result; and
// a tile of attention reads keys from front to back, its values as one unbroken part of each block.

INLINE int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Columns of the values: head_dim, and zeros up to whole tiles
static int value_dim(const Config *c) { return round_up(c->head_dim, 2 * LANES); }

// Where in the cache the keys of a pair (layer, kv head) in a block begin. The number of pairs is
// made odd: with an even one, all blocks of a head would share a fraction of the L2 cache's sets.
static size_t block_at(const Config *c, size_t block, size_t pair) {
    const size_t pairs = (size_t)c->n_layers * c->n_kv_heads | 1;
    return (block * pairs + pair) * LANES * (c->head_dim + value_dim(c));
}

static size_t block_size(const Config *c) { return block_at(c, 1, 0); }  // block 1 follows block 0

static float *cache_block(KvHead h, int pos) {
    const size_t pair = h.l * h.m->config.n_kv_heads + h.kv_head;
    return h.m->state.cache + block_at(&h.m->config, h.text->blocks[pos / LANES], pair);
}

static float *key_at(KvHead h, int pos, int j) {
    return cache_block(h, pos) + j * LANES + pos % LANES;
}

static float *value_at(KvHead h, int pos, int j) {
    const int vector = h.m->config.head_dim + j / LANES * LANES + pos % LANES;
    return cache_block(h, pos) + vector * LANES + j % LANES;
}

#ifdef PLAIN
// ------------------------------------------------------------------------------------------------
// A machine for -DPLAIN: Part I as it stands, in one thread

#undef SIMD
#define SIMD "-DPLAIN"

static void start_threads(int count) { (void)count; }
static int draft_rows(void) { return 1; }
static struct Batch *batch_init(const Config *c, int n) { return (void)c, (void)n, NULL; }

static void parallel(Job job, void *arg, int count, int chunk) {
    (void)chunk;
    job(arg, 0, count);
}

static void layer_all(Model *m, int l, int n) {
    for (int t = 0; t < n; t++) layer(m, l, t);
    progress_add(n);
}

static float *classify(Model *m, int first, int count) {
    float *logits = m->state.logits;
    for (int i = 0; i < count; i++, logits += m->config.vocab_size) scores(m, first + i, logits);
    return m->state.logits;
}
#else
// ------------------------------------------------------------------------------------------------
// Threads: a pool that runs one loop at a time. An idle worker spins for a moment, then sleeps: it
// takes no CPU time from other programs. Who takes which share varies; the results do not.

static int n_threads = 1;
static _Thread_local int thread;  // the number of the thread that reads it, from 0 on

static struct {
    Job job;  // the loop that runs. It and the next three change only while left is 0 and no item
              // runs; a thread reads them only after it has seen left > 0
    void *arg;
    int count;
    int chunk;
    _Atomic int left;    // items that nobody has taken yet
    _Atomic int active;  // threads that look for items, or run some
    pthread_mutex_t lock;
    pthread_cond_t changed;  // left became positive, or active 0
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

// Waits until *value is positive, or 0. Spins for 50 us, then sleeps.
static void wait_until(_Atomic int *value, bool positive) {
    for (double end = now() + 50e-6; now() < end;) {
        if ((atomic_load(value) > 0) == positive) return;
    }
    pthread_mutex_lock(&pool.lock);
    while ((atomic_load(value) > 0) != positive) pthread_cond_wait(&pool.changed, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

static void wake_up(void) {  // after a change: no sleeper misses it, as `lock` is held here, too
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.changed);
    pthread_mutex_unlock(&pool.lock);
}

// Takes shares of the loop until none is left. Guided scheduling: a share is 7/8 of what a thread
// would get if all took the same, so shares become smaller and all threads end together. A thread
// counts itself as active before it reads the rest of the pool, so that this stays as it is.
static void take_shares(void) {
    atomic_fetch_add(&pool.active, 1);
    for (int left = atomic_load(&pool.left); left > 0;) {
        const int fair = max_int(left * 7 / (8 * n_threads), 1), begin = pool.count - left;
        const int share = min_int(round_up(fair, pool.chunk), left);
        if (!atomic_compare_exchange_weak(&pool.left, &left, left - share)) continue;
        pool.job(pool.arg, begin, begin + share);
        left = atomic_load(&pool.left);
    }
    if (atomic_fetch_sub(&pool.active, 1) == 1) wake_up();
}

static void *worker(void *arg) {
    for (thread = (int)(intptr_t)arg;;) {
        wait_until(&pool.left, true);
        take_shares();
    }
    return NULL;
}

// Ctrl-C is the main thread's alone, where it ends a read: the workers begin with it blocked.
static void start_threads(int count) {
#ifndef _WIN32
    sigset_t interrupt, before;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    pthread_sigmask(SIG_BLOCK, &interrupt, &before);
#endif
    for (; n_threads < count; n_threads++) {
        pthread_t id;
        int error = pthread_create(&id, NULL, worker, (void *)(intptr_t)n_threads);
        if (error) die("thread %d of %d: %s; -j sets their number", n_threads + 1, count,
                       strerror(error));
    }
#ifndef _WIN32
    pthread_sigmask(SIG_SETMASK, &before, NULL);
#endif
}

static void parallel(Job job, void *arg, int count, int chunk) {
    if (n_threads == 1 || count <= chunk) {
        job(arg, 0, count);
        return;
    }
    pool.job = job;
    pool.arg = arg;
    pool.count = count;
    pool.chunk = chunk;
    atomic_store(&pool.left, count);
    wake_up();
    take_shares();
    wait_until(&pool.active, false);
}

// ------------------------------------------------------------------------------------------------
// A batch: all rows on their way through a layer

// Q8 of several vectors (cols). In memory, each is one record of 4 * stride bytes: its q8, then its
// scales, then its bias_fix. The pointers are those of vector 0: see quantized_row.
typedef struct {
    int8_t *q8;         // (cols)          the int8 values
    float *scale;       // (cols / group)
    int32_t *bias_fix;  // (cols / group)  see dot4
    size_t stride;      // from a record to the next, in floats
} Quantized;

typedef struct {       // one thread's own buffers
    float *scratch;    // (batch, head_dim or 2 * group_size, whichever is more)
    void *panel;       // what a product keeps while it runs: see panel_bytes
    float *attention;  // score, q and sum of an AttentionTask
} Workspace;

typedef struct {           // W[r] . x[t] for a range of rows r and n tokens t
    const Matrix *w;       // (rows, cols)
    const Quantized *x;    // (n, cols)
    float *out;            // the result's place: out[t * stride + r - row_begin]
    int stride;
    int row_begin;
    int row_end;
    int n;
    bool add;              // out += instead of out =
    Workspace *own;        // of the thread that computes it
} Matmul;

// Which experts run for which tokens. If token 0 chose experts 2 and 5, token 1 experts 5 and 7,
// and token 2 experts 2 and 5, then expert is 2 5 7, token is 0 2  0 1 2  1, and place is 0 2 5 6.
// A model without experts has expert 0 alone, which runs for all tokens.
typedef struct {
    float *term;   // (batch, n_experts)  see choose_experts
    float *share;  // (batch, n_experts)
    int n_active;  // how many experts were chosen by at least one token of the batch
    int *expert;   // (n_experts)         expert[0 .. n_active - 1] are these, ascending
    int *place;    // (n_experts + 1)     row i of Batch.hq belongs to expert[k] if i is in
                   //                     place[k] .. place[k + 1] - 1,
    int *token;    // (batch * n_experts_used)       and to token[i]
    Quantized xq;  // (batch * n_experts_used, dim)  row i is Batch.xq of token[i]
} Routing;

typedef struct Batch {
    const Model *m;
    const Config *c;
    const State *s;
    int l;                 // the layer's number
    const Layer *w;        // and its weights
    int n;                 // rows
    const float *norm;     // (dim)                the weights of the norm that runs
    void (*step)(const struct Batch *b, int i);  // what run_each() runs
    float *h;              // (batch, dim)         rmsnorm(x); with experts then their outputs' sum
    Quantized xq;          // (batch, dim)         Q8(h)
    float *q;              // (batch, q_dim)
    float *a;              // (batch, q_dim)
    Quantized aq;          // (batch, q_dim)       Q8(a)
    Quantized hq;          // (batch * max(n_experts_used, 1), hidden_dim)
    Routing routing;
    Workspace *workspace;  // (threads)
} Batch;

static Batch *start_layer(const Model *m, int l, int n) {
    Batch *b = m->state.b;
    b->m = m, b->c = &m->config, b->s = &m->state;
    b->l = l, b->w = &m->weights.layers[l];
    b->n = n;
    return b;
}

static void step_job(void *arg, int begin, int end) {
    const Batch *b = arg;
    for (int i = begin; i < end; i++) b->step(b, i);
}

// Calls step(b, i) for i = 0 .. count - 1, on all threads, `chunk` neighbours at a time.
static void run_each(Batch *b, void (*step)(const Batch *b, int i), int count, int chunk) {
    b->step = step;
    parallel(step_job, b, count, chunk);
}

static float *scratch(const Batch *b) { return b->workspace[thread].scratch; }

// A view of x that begins at vector t
INLINE Quantized quantized_row(const Quantized *x, int t) {
    const size_t at = t * x->stride;
    return (Quantized){x->q8 + 4 * at, x->scale + at, x->bias_fix + at, x->stride};
}

// ------------------------------------------------------------------------------------------------
// Matrix products: out = x W^T, as dot_row defines each element. A term is a group's exact dot
// product times the weights' scale; an element is the sum of its terms, each times x's scale.
// (Matrix.bytes is no uint8_t: GCC 12 makes wrong code with VNNI.)
//
// For a few tokens, reading the weights takes the time: matvec_rows takes them as they lie, as one
// sequence of groups, and makes LANES terms at a time. For more tokens, arithmetic takes the time:
// matmul_panels transposes a panel of rows: each lane is a row. Tiles multiply it with all tokens.

// Q8(x), x (n), into columns at .. at + n - 1 of row t of out
static void quantize_row(const Quantized *out, int t, int at, const float *x, int n, int group) {
    const Quantized row = quantized_row(out, t);
    quantize((Q8){row.q8 + at, row.scale + at / group}, x, n, group);
    for (int g = at / group; W_BIAS != 0 && g < (at + n) / group; g++) {
        int sum = 0;
        for (int i = 0; i < group; i++) sum += row.q8[g * group + i];
        row.bias_fix[g] = -W_BIAS * sum;
    }
}

// Transposes LANES rows of `words`, (rows, cols) words of 4 bytes: lane r of out[i * stride] is
// word i of row `row` + r, ^ flip. Past the end the last row is repeated; results are discarded.
static void transpose_rows(VecI *out, int stride, const void *words, int rows, int cols, int row,
                           int32_t flip) {
    const char *source[LANES];
    for (int r = 0; r < LANES; r++) {
        source[r] = (const char *)words + (size_t)min_int(row + r, rows - 1) * cols * 4;
    }
    int i = 0;
    for (; i + LANES <= cols; i += LANES) {
        VecI a[LANES], b[LANES];
        UNROLL for (int r = 0; r < LANES; r++) memcpy(&a[r], source[r] + 4 * (size_t)i, sizeof(*a));
        // A perfect shuffle rotates the bits of a word's number, r * LANES + column, by one. After
        // log2(LANES) of them row and column have changed places.
        UNROLL for (int n = LANES; n > 1; n /= 2) {
            UNROLL for (int r = 0; r < LANES / 2; r++) {
                b[2 * r] = zip_low(a[r], a[r + LANES / 2]);
                b[2 * r + 1] = zip_high(a[r], a[r + LANES / 2]);
            }
            UNROLL for (int r = 0; r < LANES; r++) a[r] = b[r];
        }
        UNROLL for (int r = 0; r < LANES; r++) out[(i + r) * stride] = a[r] ^ splat(flip);
    }
    for (; i < cols; i++) {
        for (int r = 0; r < LANES; r++) {
            out[i * stride][r] = load_i32(source[r] + 4 * (size_t)i) ^ flip;
        }
    }
}

// Where W[row] . x[t] goes
INLINE float *out_at(const Matmul *part, int t, int row) {
    return part->out + (size_t)t * part->stride + row - part->row_begin;
}

// Stores values, W[r] . x[t] for `count` rows r from `row` on, or adds them to what is there.
static void put_rows(const Matmul *part, int t, int row, const float *restrict values, int count) {
    float *restrict out = out_at(part, t, row);
    const bool add = part->add;
    for (int i = 0; i < count; i++) out[i] = add ? out[i] + values[i] : values[i];
}

INLINE VecI level_table(const int8_t *levels) {  // for pick_levels, ^ FLIP
    VecI table = {0};
    for (size_t i = 0; i < sizeof(table); i += 16) memcpy((char *)&table + i, levels, 16);
    return table ^ splat(FLIP);
}

// Lane i becomes the sum of lanes i * n .. i * n + n - 1 of the n vectors of a, laid end to end. n
// is a power of two; a is overwritten.
INLINE VecI sum_each(VecI *a, const int n) {
    UNROLL for (int left = n / 2; left > 0; left /= 2) {
        UNROLL for (int i = 0; i < left; i++) a[i] = add_pairs(a[2 * i], a[2 * i + 1]);
    }
    return a[0];
}

// x as a ring: after its last group come the first LANES ones again. So LANES groups of weights,
// which may go on in the next row, always meet as many neighbours of x.
typedef struct {
    int8_t *low;   // 8 bits: the groups of q8; 4 bits: their first halves
    int8_t *high;  // 4 bits: their second halves
    int32_t *bias_fix;
} Ring;

INLINE size_t ring_bytes(int n_groups, int group) {
    return (size_t)(n_groups + LANES) * (group + sizeof(int32_t));
}

INLINE Ring make_ring(int8_t *at, const Quantized *x, int n_groups, const int group,
                      const int bits) {
    const int size = group * bits / 8, n = n_groups + LANES;  // bytes of a group's part in low
    const Ring ring = {at, at + n * size, (int32_t *)(at + n * group)};
    for (int g = 0, i = 0; g < n; g++, i = i + 1 < n_groups ? i + 1 : 0) {
        memcpy(ring.low + g * size, x->q8 + i * group, size);
        memcpy(ring.high + g * size, x->q8 + i * group + size, group - size);
        ring.bias_fix[g] = x->bias_fix[i];
    }
    return ring;
}

// The CPU's prefetcher stops at the end of a page, so group_terms prefetches the weights that lie
// so many bytes ahead, and their scales. 113 cache lines are the best of those tried.
enum { BYTES_AHEAD = 7232 };

// The terms of LANES groups, from group `first` of w and group g of x on. dots[v] holds the partial
// sums of one group, or of several small ones side by side; sum_each makes a lane of each group.
INLINE VecF group_terms(const Matrix *w, size_t first, const Ring *x, int g, VecI levels,
                        const int group, const int bits) {
    const int size = group * bits / 8, share = max_int(size, sizeof(VecI));
    const int n_dots = LANES * size / share, scale_size = bits / 2;  // of a scale: 4 or 2 bytes
    const int8_t *bytes = w->bytes + first * size;
    const uint8_t *scales = (const uint8_t *)w->scales + first * scale_size;
    const int8_t *low = x->low + g * size, *high = x->high + g * size;
    VecI dots[LANES];
    __builtin_prefetch(scales + BYTES_AHEAD / size * scale_size);
    UNROLL for (int v = 0; v < n_dots; v++) {
        VecI dot = splat(0);
        UNROLL for (int i = v * share; i < (v + 1) * share; i += sizeof(VecI)) {
            const VecI b = load_vector(bytes + i);
            if (i % 64 == 0) __builtin_prefetch(bytes + i + BYTES_AHEAD, 0, 2);  // to L2
            if (bits == 8) {
                dot = dot4(dot, b ^ splat(FLIP), load_vector(low + i));
            } else {
                dot = dot4(dot, pick_levels(levels, b), load_vector(low + i));
                dot = dot4(dot, pick_levels(levels, b >> 4), load_vector(high + i));
            }
        }
        dots[v] = dot;
        __asm__ volatile("");  // keeps GCC from moving all prefetches to the front
    }
    VecI sums = sum_each(dots, n_dots);
    if (W_BIAS) sums += load_vector(x->bias_fix + g);
    const VecF scale = bits == 8 ? (VecF)load_vector(scales)
                                 : load_halves((const uint16_t *)scales);
    return __builtin_convertvector(sums, VecF) * scale;
}

// Token t, the LANES rows from `row` on, or the last ones before row_end: then only those from
// `row` on are put. Makes their terms, LANES at a time, transposes them, adds a row's in each lane.
INLINE void matvec(const Matmul *part, const Ring *x, int t, int row, const int group,
                   const int bits) {
    const Matrix *w = part->w;
    const int n_groups = w->cols / group, first = min_int(row, part->row_end - LANES);
    const VecI levels = bits == 4 ? level_table(w->levels) : splat(0);
    const float *scale = quantized_row(part->x, t).scale;
    VecF *const columns = part->own->panel, sum = {0};  // (n_groups) of LANES rows
    VecF *const terms = columns + n_groups;             // (LANES, n_groups) floats
    for (int i = 0, g = 0; i < n_groups; i++) {
        const size_t at = (size_t)first * n_groups + i * LANES;
        terms[i] = group_terms(w, at, x, g, levels, group, bits);
        for (g += LANES; g >= n_groups;) g -= n_groups;  // cheaper than %
    }
    transpose_rows((VecI *)columns, 1, terms, LANES, n_groups, 0, 0);
    for (int g = 0; g < n_groups; g++) sum = mul_add_v(columns[g], splat_f(scale[g]), sum);
    put_rows(part, t, row, (float *)&sum + row - first, first + LANES - row);
}

// The most tokens for which a matvec each is faster than panels for all, measured
enum { FEW_TOKENS_8 = 3, FEW_TOKENS_4 = 6 };

// LANES rows are read from memory for the first token, from the cache for the others.
INLINE void matvec_rows(const Matmul *part, const int group, const int bits) {
    const int n_groups = part->w->cols / group;
    int8_t *at = (int8_t *)((VecF *)part->own->panel + 2 * n_groups);  // after columns and terms
    Ring rings[FEW_TOKENS_4];
    for (int t = 0; t < part->n; t++, at += ring_bytes(n_groups, group)) {
        const Quantized x = quantized_row(part->x, t);
        rings[t] = make_ring(at, &x, n_groups, group, bits);
    }
    for (int r = part->row_begin; r < part->row_end; r += LANES) {
        for (int t = 0; t < part->n; t++) matvec(part, &rings[t], t, r, group, bits);
    }
}

// Multiplies PANEL_ROWS rows from `row` on with TILE_TOKENS tokens from t on. wq (cols / 4,
// TILE_VECS) and w_scale (n_groups, TILE_VECS) are the transposed rows. Rows of x from n on may
// hold anything; their results are discarded.
static void matmul_tile(const Matmul *part, int t, int row, const VecI *wq, const VecF *w_scale) {
    const int group = part->w->group, n_groups = part->w->cols / group;
    const int rows = min_int(PANEL_ROWS, part->row_end - row);
    const int n_tokens = min_int(TILE_TOKENS, part->n - t);
    const size_t stride = part->x->stride;
    const Quantized x = quantized_row(part->x, t);
    const int8_t *xq = x.q8;
    VecF acc[TILE_TOKENS][TILE_VECS] = {0};
    // What is added to leaves the caches early: rows, 4 KB apart in the 0.6B, share a few sets.
    for (int i = 0; part->add && i < n_tokens; i++) {
        __builtin_prefetch(out_at(part, t + i, row));
        __builtin_prefetch(out_at(part, t + i, row + PANEL_ROWS - 1));
    }
    for (int g = 0; g < n_groups; g++, w_scale += TILE_VECS) {
        VecI sum[TILE_TOKENS][TILE_VECS];
        UNROLL for (int i = 0; i < TILE_TOKENS; i++) {
            const VecI start = splat(W_BIAS ? x.bias_fix[i * stride + g] : 0);
            UNROLL for (int v = 0; v < TILE_VECS; v++) sum[i][v] = start;
        }
        for (int k = 0; k < group / 4; k++, xq += 4, wq += TILE_VECS) {
            UNROLL for (int i = 0; i < TILE_TOKENS; i++) {
                const VecI four = splat(load_i32(xq + i * stride * 4));
                UNROLL for (int v = 0; v < TILE_VECS; v++) {
                    sum[i][v] = dot4(sum[i][v], wq[v], four);
                }
            }
        }
        UNROLL for (int i = 0; i < TILE_TOKENS; i++) {
            UNROLL for (int v = 0; v < TILE_VECS; v++) {
                const VecF term = __builtin_convertvector(sum[i][v], VecF) * w_scale[v];
                acc[i][v] = mul_add_v(term, splat_f(x.scale[i * stride + g]), acc[i][v]);
            }
        }
    }
    for (int i = 0; i < n_tokens; i++) put_rows(part, t + i, row, (float *)acc[i], rows);
}

// Transposes PANEL_ROWS rows from `row` on: wq (cols / 4, TILE_VECS), w_scale (n_groups,
// TILE_VECS). With 4 bits, (cols / 8) vectors of nibbles go to the end of wq, and from there become
// twice as many vectors of levels. These never reach the nibbles that are still to be read.
static void transpose_panel(const Matrix *w, VecI *wq, VecF *w_scale, int row) {
    const int n_groups = w->cols / w->group, half = w->group / 8;
    const int words = w->cols * w->bits / 32;
    const VecI levels = w->bits == 4 ? level_table(w->levels) : splat(0);
    float *scales = (float *)(w_scale + n_groups * TILE_VECS);  // (LANES, n_groups)
    for (int v = 0; v < TILE_VECS; v++, row += LANES, wq++, w_scale++) {
        VecI *from = wq + (w->cols / 4 - words) * TILE_VECS;
        transpose_rows(from, TILE_VECS, w->bytes, w->rows, words, row, w->bits == 8 ? FLIP : 0);
        for (int i = 0; i < words && w->bits == 4; i++) {
            const VecI nibbles = from[i * TILE_VECS];
            VecI *to = wq + (i + i / half * half) * TILE_VECS;  // half: vectors of half a group
            to[0] = pick_levels(levels, nibbles);
            to[half * TILE_VECS] = pick_levels(levels, nibbles >> 4);
        }
        for (int r = 0; r < LANES; r++) {
            const int from_row = min_int(row + r, w->rows - 1);
            for (int g = 0; g < n_groups; g++) {
                scales[r * n_groups + g] = weight_scale(w, (size_t)from_row * n_groups + g);
            }
        }
        transpose_rows((VecI *)w_scale, TILE_VECS, scales, LANES, n_groups, 0, 0);
    }
}

// PANEL_ROWS rows times all tokens, while the rows are in this core's caches; then the next rows,
// of which each tile has prefetched an equal share.
static void matmul_panels(const Matmul *part) {
    const Matrix *w = part->w;
    const int tiles = (part->n + TILE_TOKENS - 1) / TILE_TOKENS;  // n > 0
    const size_t row_bytes = (size_t)w->cols * w->bits / 8, share = PANEL_ROWS * row_bytes / tiles;
    VecI *wq = part->own->panel;
    VecF *w_scale = (VecF *)wq + w->cols / 4 * TILE_VECS;
    for (int row = part->row_begin; row < part->row_end; row += PANEL_ROWS) {
        const int8_t *next = w->bytes + (row + PANEL_ROWS) * row_bytes;
        transpose_panel(w, wq, w_scale, row);
        for (int t = 0; t < part->n; t += TILE_TOKENS) {
            for (size_t i = 0; i < share; i += 64) __builtin_prefetch(next + i);
            next += share;
            matmul_tile(part, t, row, wq, w_scale);
        }
    }
}

// The group size and the number of bits are constants in matvec_rows: twice as fast.
INLINE void matvec_groups(const Matmul *part, const int group) {
    if (part->w->bits == 4) matvec_rows(part, group, 4);
    else matvec_rows(part, group, 8);
}

static void matmul_rows(const Matmul *part) {
    const Matrix *w = part->w;
    const bool few = part->n <= (w->bits == 4 ? FEW_TOKENS_4 : FEW_TOKENS_8);
    _Static_assert(FEW_TOKENS_8 <= FEW_TOKENS_4, "rings for all of them");
    if (part->n == 0) return;
    if (!few || part->row_end < LANES) matmul_panels(part);  // matvec needs LANES rows
    else if (w->group == 32) matvec_groups(part, 32);
    else if (w->group == 64) matvec_groups(part, 64);
    else if (w->group == 128) matvec_groups(part, 128);
    else matvec_groups(part, 256);
}

// out[t * stride + i] = W[row + i] . x[t] for i < rows and t < n
static void multiply(const Batch *b, float *out, int stride, const Matrix *w, int row, int rows,
                     const Quantized *x, int n) {
    matmul_rows(&(Matmul){.w = w, .x = x, .out = out, .stride = stride, .row_begin = row,
                          .row_end = row + rows, .n = n, .own = &b->workspace[thread]});
}

// The size of Workspace.panel for matrices of up to so many columns: see matmul_panels (wq,
// w_scale, scales) and matvec_rows (columns, terms and a ring for each token)
static size_t panel_bytes(int cols, int group) {
    const int n_groups = cols / group;
    const size_t panels = ((size_t)TILE_VECS * (cols / 4 + n_groups) + n_groups) * sizeof(VecI);
    const size_t few = 2 * n_groups * sizeof(VecI) + FEW_TOKENS_4 * ring_bytes(n_groups, group);
    return panels > few ? panels : few;
}

static void matmul_job(void *arg, int begin, int end) {
    Matmul part = *(const Matmul *)arg;
    part.row_begin = begin * PANEL_ROWS;
    part.row_end = min_int(end * PANEL_ROWS, part.w->rows);
    part.out += part.row_begin;
    part.own += thread;
    matmul_rows(&part);
}

// out = W x, or out += W x, for n vectors, on all threads: x (n, cols), out (n, rows)
static void matmul_all(const Batch *b, float *out, const Matrix *w, const Quantized *x, int n,
                       bool add) {
    Matmul all = {.w = w, .x = x, .out = out, .stride = w->rows, .n = n, .add = add,
                  .own = b->workspace};
    parallel(matmul_job, &all, (w->rows + PANEL_ROWS - 1) / PANEL_ROWS, 1);
}

static int draft_rows(void) { return TILE_TOKENS; }

// ------------------------------------------------------------------------------------------------
// Attention
//
// A query of attention is one query head of one row. It goes through the positions in spans and
// keeps the scores of one span only, as attend() does, and as in FlashAttention (arXiv 2205.14135).
// The queries of a kv head are those of all query heads that share it, row by row. A task is up to
// ATT_TASK of them, all of one text, so that a span's keys and values (256 KB if head_dim is 128)
// come to L2 once. A tile is ATT_QUERIES of them, or 2 in a task of few, as in decoding, by 2
// vectors, of positions for the scores, of columns for the values; its sums stay in registers.
enum { ATT_TASK = 96, ATT_QUERIES = LANES == 16 ? 12 : 6 };
enum { SCORE_STRIDE = SPAN + LANES };  // rows a multiple of 1 KB apart would share L1 sets
_Static_assert(SPAN % 32 == 0 && ATT_TASK % ATT_QUERIES == 0, "whole tiles");

typedef struct {
    float *score;            // (ATT_TASK, SCORE_STRIDE)  of the span, then the terms
    float *q;                // (head_dim, ATT_TASK)      transposed: a tile's are neighbours
    float *sum;              // (ATT_TASK, value_dim)     of the terms times the values, so far
    const Config *c;
    KvHead kv;               // whose keys and values they all see
    int n;                   // queries, rounded up to whole tiles: the last one is repeated
    int start;               // the span: positions start .. end - 1, start a multiple of SPAN
    int end;
    float *out[ATT_TASK];    // (head_dim)                each query's place in State.a
    int len[ATT_TASK];       // positions that each query sees, its own and those before; ascending
    float largest[ATT_TASK]; // the largest score so far
    float total[ATT_TASK];   // the sum of the terms
    float keep[ATT_TASK];    // the factor on what was summed before
} AttentionTask;

// The span's block that holds position pos, or its last one: no later one is sure to exist. Its
// keys come first, head_dim vectors, then its values.
INLINE const VecF *block_of(const AttentionTask *task, int pos) {
    return (VecF *)cache_block(task->kv, min_int(pos, task->end - 1));
}

// score = q . k / sqrt(head_dim), for `queries` queries from r on and two blocks of positions from
// pos on; what comes after the span's end is overwritten later. The CPU can't foresee where the
// next two blocks are, so the first tile prefetches them for all.
INLINE void score_tile(const AttentionTask *task, int r, int pos, const int queries) {
    const int head_dim = task->c->head_dim;
    const float scale = 1 / sqrtf((float)head_dim), *q = task->q + r;
    VecF *score = (VecF *)(task->score + r * SCORE_STRIDE + pos - task->start);
    VecF sum[ATT_QUERIES][2] = {0};
    const VecF *keys[4];
    UNROLL for (int i = 0; i < 4; i++) keys[i] = block_of(task, pos + i * LANES);
    for (int j = 0; j < head_dim; j++, q += ATT_TASK) {
        for (int v = 2; v < 4 && r == 0; v++) __builtin_prefetch(keys[v] + j);
        UNROLL for (int i = 0; i < queries; i++) {
            UNROLL for (int v = 0; v < 2; v++) {
                sum[i][v] = mul_add_v(keys[v][j], splat_f(q[i]), sum[i][v]);
            }
        }
    }
    UNROLL for (int i = 0; i < queries; i++, score += SCORE_STRIDE / LANES) {
        UNROLL for (int v = 0; v < 2; v++) score[v] = sum[i][v] * scale;
    }
}

// sum = keep * sum + (the span's terms times values), for `queries` queries from r on and two
// vectors of columns from vector j on. The tile stops where its first query does: this query's term
// of a later position is 0, but 0 times infinity or NaN is NaN. Each query sums the rest of its
// positions, fewer than the tile has queries, alone. The prefetch takes not the next block but the
// one after it: the next may be needed before its prefetch has come.
INLINE void value_tile(const AttentionTask *task, int r, int j, const int queries) {
    const int vectors = value_dim(task->c) / LANES, first = task->c->head_dim + j * LANES;
    const int common = max_int(min_int(task->end, task->len[r]), task->start);
    const float *term = task->score + r * SCORE_STRIDE;
    VecF *all = (VecF *)task->sum + r * vectors + j;
    VecF sum[ATT_QUERIES][2] = {0}, copy[ATT_QUERIES][2];
    const VecF *values = block_of(task, task->start) + first, *later;
    const VecF *next = block_of(task, task->start + LANES) + first;
    for (int pos = task->start; pos < common; pos += LANES, values = next, next = later) {
        later = block_of(task, pos + 2 * LANES) + first;
        for (int k = 0; k < min_int(LANES, common - pos); k++, term++) {
            for (int v = 0; v < 2 && r == 0; v++) __builtin_prefetch(later + v * LANES + k);
            UNROLL for (int i = 0; i < queries; i++) {
                const VecF weight = splat_f(term[i * SCORE_STRIDE]);
                UNROLL for (int v = 0; v < 2; v++) {
                    sum[i][v] = mul_add_v(values[v * LANES + k], weight, sum[i][v]);
                }
            }
        }
    }
    // clang keeps `sum` in registers only if no index of it is a variable.
    UNROLL for (int i = 0; i < queries; i++) {
        UNROLL for (int v = 0; v < 2; v++) copy[i][v] = sum[i][v];
    }
    for (int i = 0; i < queries; i++, all += vectors, term += SCORE_STRIDE) {
        const VecF keep = splat_f(task->keep[r + i]);
        const int end = min_int(task->end, task->len[r + i]);
        VecF own[2] = {copy[i][0], copy[i][1]};
        for (int pos = common; pos < end; pos++) {
            const VecF *values = block_of(task, pos) + first + pos % LANES;
            const VecF weight = splat_f(term[pos - common]);
            UNROLL for (int v = 0; v < 2; v++) {
                own[v] = mul_add_v(values[v * LANES], weight, own[v]);
            }
        }
        UNROLL for (int v = 0; v < 2; v++) all[v] = mul_add_v(all[v], keep, own[v]);
    }
}

// Each query's scores become the terms exp(score - largest). Positions after its own get -INFINITY,
// so that their terms are 0 (causal), up to a multiple of 16: sum_of is slow with a rest. If all
// scores overflow, `largest` stays -FLT_MAX, as -INFINITY - -INFINITY is NaN.
static void span_softmax(AttentionTask *task) {
    const int width = (task->end - task->start + 15) / 16 * 16;
    float *score = task->score;
    for (int r = 0; r < task->n; r++, score += SCORE_STRIDE) {
        for (int i = max_int(task->len[r] - task->start, 0); i < width; i++) score[i] = -INFINITY;
        const float before = task->largest[r], largest = fmaxf(before, max_of(score, width));
        task->keep[r] = fast_exp(before - largest);
        const float total = softmax_terms(score, width, largest);
        task->total[r] = mul_add(task->total[r], task->keep[r], total);
        task->largest[r] = largest;
    }
}

// `queries` is a constant. A tile that sees nothing of the positions is left out.
INLINE void attend_span(AttentionTask *task, const int queries) {
    for (int pos = task->start; pos < task->end; pos += 2 * LANES) {
        for (int r = 0; r < task->n; r += queries) {
            if (pos < task->len[r + queries - 1]) score_tile(task, r, pos, queries);
        }
    }
    span_softmax(task);
    for (int j = 0; j < value_dim(task->c) / LANES; j += 2) {
        for (int r = 0; r < task->n; r += queries) value_tile(task, r, j, queries);
    }
}

// Attention of queries first .. first + count - 1 of a kv head, all of one text
static void attend_task(const Batch *b, int kv_head, int first, int count) {
    const Config *c = b->c;
    const int per_kv = c->n_heads / c->n_kv_heads, columns = value_dim(c);
    float *score = b->workspace[thread].attention, *q = score + ATT_TASK * SCORE_STRIDE;
    AttentionTask task = {.score = score, .q = q, .sum = q + ATT_TASK * c->head_dim,
                          .c = c, .kv = kv_head_of(b->m, b->l, first / per_kv, kv_head),
                          .n = round_up(count, 2 * count <= ATT_QUERIES ? 2 : ATT_QUERIES)};
    for (int r = 0; r < task.n; r++) {
        const int query = first + min_int(r, count - 1), t = query / per_kv;
        const int head = kv_head * per_kv + query % per_kv;
        const size_t at = (size_t)t * c->q_dim + head * c->head_dim;
        for (int j = 0; j < c->head_dim; j++) q[j * ATT_TASK + r] = b->q[at + j];
        task.out[r] = b->a + at;
        task.len[r] = b->s->rows[t].pos + 1;
        task.largest[r] = -FLT_MAX;
    }
    memset(task.sum, 0, (size_t)task.n * columns * sizeof(float));
    while (task.end < task.len[task.n - 1]) {
        task.start = task.end;
        task.end = min_int(task.start + SPAN, task.len[task.n - 1]);
        if (task.n < ATT_QUERIES) attend_span(&task, 2);
        else attend_span(&task, ATT_QUERIES);
    }
    for (int r = 0; r < count; r++) {
        const float *sum = task.sum + r * columns, inverse = 1 / task.total[r];
        float *a = task.out[r];  // GCC does not vectorize a loop over task.out[r][j]
        for (int j = 0; j < c->head_dim; j++) a[j] = sum[j] * inverse;
    }
}

// Query i of all is query i % per_head of kv head i / per_head.
static void attend_job(void *arg, int begin, int end) {
    const Batch *b = arg;
    const Row *rows = b->s->rows;
    const int per_kv = b->c->n_heads / b->c->n_kv_heads, per_head = b->n * per_kv;
    for (int i = begin, count; i < end; i += count) {
        const int first = i % per_head, left = min_int(end - i, per_head - first);
        const int most = min_int(left, ATT_TASK);
        const Text *text = rows[first / per_kv].text;
        for (count = 1; count < most && rows[(first + count) / per_kv].text == text;) count++;
        attend_task(b, i / per_head, first, count);
    }
}

// attend() for all query heads of all rows. A thread takes at least as many queries as a row and as
// a tile have, if there are as many.
static void attend_all(Batch *b) {
    const int per_kv = b->c->n_heads / b->c->n_kv_heads, n = b->n * per_kv;
    parallel(attend_job, b, n * b->c->n_kv_heads, min_int(n, round_up(per_kv, ATT_QUERIES)));
}

// ------------------------------------------------------------------------------------------------
// The work of a layer, for all rows: the bits of layer() in Part I, as each sum has its order.
//
// Heads, SwiGLU and experts: each thread computes some rows of a matrix at a time for all rows of
// the batch, so that the weights are read once, and goes on while the result is in its caches.

// From row `from` of x, makes row `to` of h = rmsnorm(x, w) and of xq = Q8(h).
static void norm_row(const Model *m, const float *w, int from, int to) {
    const Config *c = &m->config;
    float *h = m->state.b->h + (size_t)to * c->dim;
    rmsnorm(h, m->state.x + (size_t)from * c->dim, w, c->dim, c->rms_norm_eps);
    quantize_row(&m->state.b->xq, to, 0, h, c->dim, c->group_size);
}

static void norm_step(const Batch *b, int t) { norm_row(b->m, b->norm, t, t); }

static void norm_all(Batch *b, const float *w) {
    b->norm = w;
    run_each(b, norm_step, b->n, 4);
}

// Head i of all, for all rows: first those of k, then those of v, then those of q.
static void head_step(const Batch *b, int i) {
    const Config *c = b->c;
    const int head_dim = c->head_dim, n = c->n_kv_heads, kind = min_int(i / n, 2);
    const bool k = kind == 0, v = kind == 1;
    const int head = i - kind * n, stride = k || v ? head_dim : c->q_dim;
    const Matrix *w = k ? &b->w->wk : v ? &b->w->wv : &b->w->wq;
    const float *bias = k ? b->w->bk : v ? b->w->bv : b->w->bq;
    float *out = k || v ? scratch(b) : b->q + head * head_dim;
    multiply(b, out, stride, w, head * head_dim, head_dim, &b->xq, b->n);
    for (int t = 0; t < b->n; t++, out += stride) {
        const KvHead h = kv_head_of(b->m, b->l, t, head);
        const int pos = b->s->rows[t].pos;
        if (bias) add(out, bias + head * head_dim, head_dim);
        if (!v) norm_and_rope(b->m, t, out, k ? b->w->k_norm : b->w->q_norm);
        for (int j = 0; k && j < head_dim; j++) *key_at(h, pos, j) = out[j];
        for (int j = 0; v && j < head_dim; j++) *value_at(h, pos, j) = out[j];
    }
}

// Other tokens read a token only through its k and v. So in the last layer, only the rows that are
// needed go on after these are stored, perhaps none: they move to the front.
static void keep_needed(Batch *b) {
    const size_t dim = b->c->dim, q_dim = b->c->q_dim;
    const State *s = b->s;
    const int n = b->n;
    b->n = 0;
    for (int t = 0; t < n; t++) {
        const Row row = s->rows[t];
        s->rows[t].needed = false;
        if (!row.needed) continue;
        s->rows[b->n] = row;
        memmove(s->x + b->n * dim, s->x + t * dim, dim * sizeof(float));
        memmove(b->q + b->n++ * q_dim, b->q + t * q_dim, q_dim * sizeof(float));
    }
}

static void quantize_a(const Batch *b, int t) {
    const int q_dim = b->c->q_dim;
    quantize_row(&b->aq, t, 0, b->a + (size_t)t * q_dim, q_dim, b->c->group_size);
}

// Item i is group i % n_groups of the rows of hq that belong to expert[i / n_groups]. `scratch` is
// small, for the CPU's caches: a round has room for W1 h and W3 h of n tokens, batch / n groups.
static void swiglu_job(void *arg, int begin, int end) {
    const Batch *b = arg;
    const Routing *r = &b->routing;
    const int group = b->c->group_size, n_groups = b->c->hidden_dim / group;
    for (int i = begin, count; i < end; i += count) {
        const int k = i / n_groups, g = i % n_groups, place = r->place[k];
        const int n = r->place[k + 1] - place, row = (r->expert[k] * n_groups + g) * group;
        const Quantized x = quantized_row(&r->xq, place);
        count = min_int(min_int(end - i, n_groups - g), b->s->batch / max_int(n, 1));
        const int cols = count * group;
        float *gate = scratch(b), *up = gate + n * cols;
        multiply(b, gate, cols, &b->w->w1, row, cols, &x, n);
        multiply(b, up, cols, &b->w->w3, row, cols, &x, n);
        for (int t = 0; t < n; t++, gate += cols, up += cols) {
            silu_times(gate, up, cols);
            quantize_row(&b->hq, place + t, g * group, gate, cols, group);
        }
    }
}

// hq = Q8(silu(W1 xq) * (W3 xq)), some columns at a time
static void swiglu_all(Batch *b) {
    Routing *r = &b->routing;
    if (!b->w->router) r->place[1] = b->n;
    parallel(swiglu_job, b, r->n_active * (b->c->hidden_dim / b->c->group_size), 1);
}

static void score_expert(const Batch *b, int i) {
    const int dim = b->c->dim, t = i / b->c->n_experts, e = i % b->c->n_experts;
    b->routing.term[i] = dot_of(b->w->router + (size_t)e * dim, b->h + (size_t)t * dim, dim);
}

// Row t of h, which nobody needs any more, becomes the sum of the experts' outputs so far.
static void choose_row(const Batch *b, int t) {
    const Routing *r = &b->routing;
    const size_t at = (size_t)t * b->c->n_experts;
    float *h = b->h + (size_t)t * b->c->dim;
    memset(h, 0, b->c->dim * sizeof(float));
    if (!choose_experts(b->c, r->term + at, r->share + at)) h[0] = NAN;
}

static void gather_row(const Batch *b, int i) {  // a whole vector: q8, scale and bias_fix
    const Routing *r = &b->routing;
    const Quantized from = quantized_row(&b->xq, r->token[i]), to = quantized_row(&r->xq, i);
    memcpy(to.q8, from.q8, to.stride * 4);
}

// Adds the experts' outputs to groups begin .. end - 1 of each token's x. One call adds all experts
// to an element, in ascending order, so that the result does not depend on the threads.
static void experts_output_job(void *arg, int begin, int end) {
    const Batch *b = arg;
    const Routing *r = &b->routing;
    const int dim = b->c->dim, group = b->c->group_size;
    for (int k = 0; k < r->n_active; k++) {
        const int e = r->expert[k], place = r->place[k], n = r->place[k + 1] - place;
        const Quantized hq = quantized_row(&b->hq, place);
        for (int at = begin * group; at < end * group; at += group) {
            float *out = scratch(b);
            multiply(b, out, group, &b->w->w2, e * dim + at, group, &hq, n);
            for (int j = 0; j < n; j++, out += group) {
                const int t = r->token[place + j];
                const float share = r->share[(size_t)t * b->c->n_experts + e];
                float *sum = b->h + (size_t)t * dim + at;
                for (int i = 0; i < group; i++) sum[i] += share * out[i];
            }
        }
    }
    for (int t = 0; t < b->n; t++) {
        const size_t at = (size_t)t * dim + begin * group;
        add(b->s->x + at, b->h + at, (end - begin) * group);
    }
}

// An expert runs for all tokens that chose it together, so that its weights are read once.
static void experts_all(Batch *b) {
    const int n_experts = b->c->n_experts;
    Routing *r = &b->routing;
    run_each(b, score_expert, b->n * n_experts, 8);
    run_each(b, choose_row, b->n, 4);
    r->n_active = 0;
    for (int e = 0, n = 0; e < n_experts; e++) {
        for (int t = 0; t < b->n; t++) {
            if (r->share[(size_t)t * n_experts + e] != 0) r->token[n++] = t;
        }
        if (n == r->place[r->n_active]) continue;  // nobody chose e
        r->expert[r->n_active++] = e;
        r->place[r->n_active] = n;
    }
    run_each(b, gather_row, r->place[r->n_active], 16);
    swiglu_all(b);
    parallel(experts_output_job, b, b->c->dim / b->c->group_size, 1);
}

static void layer_all(Model *m, int l, int n) {
    Batch *b = start_layer(m, l, n);
    const Layer *w = b->w;
    (void)layer, (void)scores;  // define what this and classify() compute
    norm_all(b, w->rms_att);
    run_each(b, head_step, b->c->n_heads + 2 * b->c->n_kv_heads, 1);
    if (l == b->c->n_layers - 1) keep_needed(b);
    attend_all(b);
    run_each(b, quantize_a, b->n, 4);
    matmul_all(b, m->state.x, &w->wo, &b->aq, b->n, true);
    norm_all(b, w->rms_ffn);
    if (w->router) {
        experts_all(b);
    } else {
        swiglu_all(b);
        matmul_all(b, m->state.x, &w->w2, &b->hq, b->n, true);
    }
    progress_add(n);
}

static float *classify(Model *m, int first, int count) {
    const State *s = &m->state;
    for (int t = 0; t < count; t++) norm_row(m, m->weights.rms_final, first + t, t);
    matmul_all(s->b, s->logits, &m->weights.classifier, &s->b->xq, count, false);
    return s->logits;
}

// ------------------------------------------------------------------------------------------------
// The memory of a batch

// Spare rows follow, because the last tile of a product may read past the n rows.
static Quantized quantized_init(size_t n, int cols, int group) {
    const size_t words = cols / 4, n_groups = cols / group;
    const size_t stride = (words + 2 * n_groups + 15) / 16 * 16;  // rows are aligned to 64 bytes
    int32_t *p = activations((n + TILE_TOKENS) * stride, sizeof(*p));
    return (Quantized){(int8_t *)p, (float *)p + words, p + words + n_groups, stride};
}

static Batch *batch_init(const Config *c, int batch) {
    const int widest = max_int(max_int(c->dim, c->q_dim), c->hidden_dim);  // cols of any matrix
    const int n_experts = max_int(c->n_experts, 1), group = c->group_size;
    const size_t n = batch, chosen = n * max_int(c->n_experts_used, 1);
    const size_t task_floats = ATT_TASK * (SCORE_STRIDE + c->head_dim + value_dim(c));
    Batch *b = activations(1, sizeof(Batch));
    *b = (Batch){.h = floats(n * c->dim), .q = floats(n * c->q_dim), .a = floats(n * c->q_dim),
                 .xq = quantized_init(n, c->dim, group), .aq = quantized_init(n, c->q_dim, group),
                 .hq = quantized_init(chosen, c->hidden_dim, group),
                 .workspace = activations(n_threads, sizeof(Workspace))};
    b->routing = (Routing){.term = floats(n * n_experts), .share = floats(n * n_experts),
                           .n_active = 1,
                           .expert = activations(n_experts, sizeof(int)),
                           .place = activations(n_experts + 1, sizeof(int)),
                           .token = activations(chosen, sizeof(int)),
                           .xq = c->n_experts ? quantized_init(chosen, c->dim, group) : b->xq};
    for (int i = 0; i < n_threads; i++) {
        b->workspace[i] = (Workspace){floats(n * max_int(c->head_dim, 2 * group)),
                                      activations(panel_bytes(widest, group), 1),
                                      floats(task_floats)};
    }
    return b;
}
#endif

// ------------------------------------------------------------------------------------------------
// The memory of a run: everything that a pass needs is allocated here, once

static const char *version(void) { return "qwen3 " VERSION " (" SIMD ")\n"; }

static int most_blocks = INT_MAX;  // tests make it small

static double position_size(const Config *c) {
    return block_size(c) * sizeof(float) / (double)LANES;
}

// The blocks of `texts` texts, but at most a quarter of the memory, and at least those of one text
static int pool_blocks(const Config *c, int seq_len, int texts) {
    const double room = memory_size() / 4 / position_size(c) / LANES;
    const double one = (seq_len + LANES - 1) / LANES;
    return (int)fmin(one * texts, fmax(one, fmin(room, most_blocks)));
}

static void cache_copy(const Model *m, int to, int from) {
    const size_t size = block_size(&m->config);
    memmove(m->state.cache + to * size, m->state.cache + from * size, size * sizeof(float));
}

static Q8 q8_init(int cols, int group) { return (Q8){activations(cols, 1), floats(cols / group)}; }

static void state_init(Model *m, int seq_len, int batch, int logit_rows, int texts) {
    const Config *c = &m->config;
    State *s = &m->state;
    const int group = c->group_size;
    const size_t n = batch;
    *s = (State){.seq_len = seq_len, .batch = batch, .rows = activations(n, sizeof(Row)),
                 .cos = floats(n * c->head_dim / 2), .sin = floats(n * c->head_dim / 2),
                 .x = floats(n * c->dim), .logits = floats((size_t)logit_rows * c->vocab_size),
                 .logit_rows = logit_rows,
                 .blocks = pool_blocks(c, seq_len, texts), .block_len = LANES,
                 .h = floats(c->dim), .xq = q8_init(c->dim, group), .q = floats(c->q_dim),
                 .k = floats(c->kv_dim), .v = floats(c->kv_dim), .a = floats(c->q_dim),
                 .aq = q8_init(c->q_dim, group), .gate = floats(c->hidden_dim),
                 .up = floats(c->hidden_dim), .hq = q8_init(c->hidden_dim, group),
                 .term = floats(c->n_experts), .share = floats(c->n_experts), .out = floats(c->dim),
                 .y = floats(c->dim)};
    s->b = batch_init(c, batch);
    const size_t size = block_size(c) * sizeof(float);
    s->cache = alloc(s->blocks, size, "the KV cache (-c makes it smaller)");
#ifdef MADV_HUGEPAGE  // attention jumps from block to block: huge pages save TLB misses
    char *page = (char *)s->cache + (-(uintptr_t)s->cache & (sysconf(_SC_PAGESIZE) - 1));
    madvise(page, s->blocks * size, MADV_HUGEPAGE);
#endif
}

// ------------------------------------------------------------------------------------------------
// POSIX and Windows: everything that differs between systems

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// Ctrl-C stops an answer, or a conversation that waits for a message; while `patience` is -1, it
// ends the program. So does another one if the first had no effect for `patience` seconds: two
// quick ones may be meant as one.
static void on_interrupt(int signal) {
    static volatile double first;
    (void)signal;
    if (patience < 0 || (interrupted && now() >= first + patience)) _exit(EXIT_INTERRUPT);
    if (!interrupted) first = now();
    interrupted = 1;
}

// SIGILL: this CPU is older than the program's. SIGBUS: a mapped file was cut, or its disk fails.
static void on_fatal(int signal) {
    const char *text = signal == SIGILL
        ? "qwen3: CPU: lacks an instruction of this build (" SIMD "); make portable is for all\n"
        : "qwen3: model: can't be read any more; has its file been cut, or does its disk fail?\n";
    while (atomic_flag_test_and_set(&dying)) {}
    (void)!write(STDERR_FILENO, text, strlen(text));
    _exit(EXIT_FAILURE);
}

// Runs before main. It is one call only, so that it has no instruction that this CPU may lack.
__attribute__((constructor)) static void catch_unknown_instructions(void) {
    signal(SIGILL, on_fatal);
}

#ifdef _WIN32
// POSIX as far as it is used here: what MinGW lacks, or has without UTF-8 or large files
#define O_NONBLOCK 0
#define MAP_FAILED NULL
#define poll(...) (void)0
#define wait_for_input(fd) (void)(fd)
#define ioctl(fd, request, n) !PeekNamedPipe(handle(fd), NULL, 0, NULL, (DWORD *)(n), NULL)
#define mmap(at, size, protection, flags, fd, offset) map_file(fd)
#define open(path, flags, mode) _wopen(wide(path), (flags) | _O_BINARY, (mode) & 0600)
#define stat_file(path, st) _wstat64(wide(path), (void *)(st))  // of the same layout
#define isatty(fd) GetConsoleMode(handle(fd), &(DWORD){0})
#define NO_READER EINVAL  // what write() says of a pipe
#define read read_bytes

static wchar_t *wide(const char *path) {
    static wchar_t text[4096];
    if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, text, 4096)) text[0] = 0;
    return text;
}

static HANDLE handle(int fd) { return (HANDLE)_get_osfhandle(fd); }

static void *map_file(int fd) {
    HANDLE map = CreateFileMappingW(handle(fd), NULL, PAGE_READONLY, 0, 0, NULL);
    errno = ENOMEM;
    return map ? MapViewOfFile(map, FILE_MAP_READ, 0, 0, 0) : MAP_FAILED;
}

// A console gives a line as UTF-16, which ends in \r\n, or at Ctrl-D or Ctrl-Z.
static ssize_t read_bytes(int fd, void *p, size_t size) {
    static wchar_t text[8192];
    CONSOLE_READCONSOLE_CONTROL ends = {sizeof(ends), 0, 1 << 4 | 1 << 26, 0};
    DWORD n = 0;
    if (!isatty(fd)) return _read(fd, p, size);
    if (!ReadConsoleW(handle(fd), text, 8192, &n, &ends) || n == 0) {
        Sleep(100);  // Ctrl-C: its handler runs in a thread of its own
        errno = EINTR;
        return interrupted ? -1 : 0;
    }
    if (text[n - 1] == 4 || text[n - 1] == 26) n--;
    else if (n > 1 && text[n - 2] == '\r') text[--n - 1] = '\n';
    return WideCharToMultiByte(CP_UTF8, 0, text, n, p, size, NULL, NULL);
}

static bool input_ready(int fd) {
    int n = 0;
    return ioctl(fd, FIONREAD, &n) != 0 || n > 0;
}

static bool file_lock(int fd, bool alone) {  // no byte that is there, as nobody could read that
    OVERLAPPED at = {.OffsetHigh = INT32_MAX};
    const DWORD how = LOCKFILE_FAIL_IMMEDIATELY | (alone ? LOCKFILE_EXCLUSIVE_LOCK : 0);
    return LockFileEx(handle(fd), how, 0, 1, 0, &at) || GetLastError() != ERROR_LOCK_VIOLATION;
}

static double memory_size(void) {
    MEMORYSTATUSEX memory = {.dwLength = sizeof(memory)};
    return GlobalMemoryStatusEx(&memory) ? (double)memory.ullTotalPhys : 0;
}

static Waiting input_waits(void) {  // the lines of a pasted block arrive together
    static INPUT_RECORD records[4096];
    DWORD n = 0;
    Waiting waiting = NOTHING;
    Sleep(30);
    PeekConsoleInputW(handle(STDIN_FILENO), records, 4096, &n);
    for (DWORD i = 0; i < n && waiting != LINE; i++) {
        const KEY_EVENT_RECORD *key = &records[i].Event.KeyEvent;
        const bool typed = records[i].EventType == KEY_EVENT && key->bKeyDown;
        if (typed && key->uChar.UnicodeChar) waiting = key->uChar.UnicodeChar == '\r' ? LINE : PART;
    }
    return waiting;
}

static int cpu_count(void) { return pthread_num_processors_np(); }  // hardware threads

static BOOL WINAPI on_console_event(DWORD event) {
    return event == CTRL_C_EVENT && (on_interrupt(SIGINT), TRUE);
}

// Makes the arguments UTF-8, standard input and output binary, and the console's output UTF-8.
static void start_platform(int *argc, char ***argv) {
    static char text[3 << 15], *at = text;  // a command line has less than 1 << 15 of UTF-16
    wchar_t **args = CommandLineToArgvW(GetCommandLineW(), argc);
    *argv = alloc(*argc + 1, sizeof(char *), "the arguments");
    for (int i = 0; i < *argc; i++) {
        (*argv)[i] = at;
        at += WideCharToMultiByte(CP_UTF8, 0, args[i], -1, at, sizeof(text), NULL, NULL);
    }
    for (int fd = 0; fd < 3; fd++) _setmode(fd, _O_BINARY);
    SetConsoleOutputCP(CP_UTF8);
    SetConsoleMode(handle(STDOUT_FILENO), ENABLE_PROCESSED_OUTPUT | ENABLE_WRAP_AT_EOL_OUTPUT |
                                          ENABLE_VIRTUAL_TERMINAL_PROCESSING);
    SetConsoleCtrlHandler(on_console_event, TRUE);
}
#else
#define NO_READER EPIPE
#define stat_file stat

// Reads a file by fscanf. Returns how many values it has.
static int scan_file(const char *path, const char *format, void *first, void *second) {
    FILE *f = fopen(path, "r");
    const int n = f ? fscanf(f, format, first, second) : 0;
    if (f) fclose(f);
    return n;
}

// The least limit of this process's cgroup and of those that it is in (Linux, version 2), from
// files with a number, or "max" for none. cpu.max has two, "QUOTA PERIOD": cores are their ratio.
static double cgroup_limit(const char *name) {
    char group[4000] = "", path[4096];
    double least = INFINITY;
    scan_file("/proc/self/cgroup", "0::%3999[^\n]", group, NULL);
    for (size_t n = strlen(group) + 1; n-- > 0;) {
        double limit, period = 1;
        if (group[n] && group[n] != '/') continue;
        snprintf(path, sizeof(path), "/sys/fs/cgroup%.*s/%s", (int)n, group, name);
        if (scan_file(path, "%lf %lf", &limit, &period) > 0) least = fmin(least, limit / period);
    }
    return least;
}

// Physical cores, as a second thread on a core gains nothing: a core's second CPU counts only if
// its first is not ours. On macOS the fast ones, else all CPUs. At most what the cgroup may use.
static int cpu_count(void) {
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
#ifdef __linux__
    cpu_set_t ours;
    const bool known = sched_getaffinity(0, sizeof(ours), &ours) == 0;
    if (known) cores = 0;
    for (int cpu = 0; known && cpu < CPU_SETSIZE; cpu++) {
        char path[96];
        int first = cpu;
        if (!CPU_ISSET(cpu, &ours)) continue;
        snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
                 cpu);
        scan_file(path, "%d", &first, NULL);
        cores += first == cpu || !CPU_ISSET(first, &ours);
    }
#elif defined(__APPLE__)
    sysctlbyname("hw.perflevel0.physicalcpu", &cores, &(size_t){sizeof(cores)}, NULL, 0);
#endif
    return max_int((int)fmin(cores, ceil(cgroup_limit("cpu.max"))), 1);
}

// The machine's memory, or less if this process has a limit: ulimit -v, its cgroup's
static double memory_size(void) {
    double size = (double)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0) size = fmin(size, limit.rlim_cur);
    return fmin(size, cgroup_limit("memory.max"));
}

// A file system that has no locks has none to break.
static bool file_lock(int fd, bool alone) {
    return flock(fd, (alone ? LOCK_EX : LOCK_SH) | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

static bool input_ready(int fd) { return poll(&(struct pollfd){fd, POLLIN, 0}, 1, 0) != 0; }

// Waits for something to read, or the end, or Ctrl-C. A Ctrl-C that comes just before the wait is
// blocked until the wait has begun: else it would go unnoticed until something is there to read.
static void wait_for_input(int fd) {
    sigset_t interrupt, before;
    fd_set set;
    if (fd >= FD_SETSIZE) return;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    sigprocmask(SIG_BLOCK, &interrupt, &before);
    if (!interrupted) pselect(fd + 1, &set, NULL, NULL, NULL, &before);
    sigprocmask(SIG_SETMASK, &before, NULL);
}

// A pasted block's lines arrive within about 30 ms. Normally the terminal counts only whole lines;
// what follows the last newline is counted only while ICANON is off. (So is Ctrl-D, which would be
// lost then.) Signals are blocked meanwhile: one that ended the program would leave it off.
static Waiting input_waits(void) {
    struct termios cooked, raw;
    sigset_t all, before;
    int waiting = 0;
    const bool ready = poll(&(struct pollfd){STDIN_FILENO, POLLIN, 0}, 1, 30) != 0;
    if (ioctl(STDIN_FILENO, FIONREAD, &waiting) == 0 && waiting > 0) return LINE;
    if (ready || tcgetattr(STDIN_FILENO, &cooked) != 0) return NOTHING;  // ready: Ctrl-D
    raw = cooked;
    raw.c_lflag &= ~(tcflag_t)ICANON;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    ioctl(STDIN_FILENO, FIONREAD, &waiting);
    tcsetattr(STDIN_FILENO, TCSANOW, &cooked);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return waiting > 0 ? PART : NOTHING;
}

static void start_platform(int *argc, char ***argv) {
    (void)argc, (void)argv;
    signal(SIGBUS, on_fatal);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);  // ulimit -f: the write fails
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt}, NULL);  // ends a read, too
}
#endif

static bool is_terminal(int fd) { return isatty(fd); }

static unsigned file_mode(const char *path) {
    struct stat st;
    return stat_file(path, &st) == 0 ? st.st_mode : 0;
}

static int file_open(const char *path, bool append) {
    if (append) return open(path, O_RDWR | O_CREAT | O_APPEND, 0666);
    return strcmp(path, "-") == 0 ? STDIN_FILENO : open(path, O_RDONLY, 0);
}

static double file_size(int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? (double)st.st_size : 0;
}

static bool same_file(int a, int b) {  // Windows' fstat has no inode
    struct stat x, y;
    return file_size(a) > 0 && fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_ino != 0 &&
           x.st_ino == y.st_ino && x.st_dev == y.st_dev;
}

static Bytes file_map(const char *path) {
    const int fd = open(path, O_RDONLY | O_NONBLOCK, 0);  // does not wait for a named pipe's writer
    if (fd < 0) die("%s: %s, expected a file made by export.py", path, strerror(errno));
    const size_t size = (size_t)file_size(fd);
    if (size == 0) die("%s: can't be used, expected a regular file with data, found none", path);
    void *p = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) die("%s: can't be mapped: %s", path, strerror(errno));
    close(fd);
#ifdef MADV_HUGEPAGE  // of 2 MB, if the file system has them: fewer TLB misses. Not if memory may
    // be too small for the model: an expert's matrix, often of less than 1 MB, would read more.
    if (size < 0.75 * memory_size()) madvise(p, size, MADV_HUGEPAGE);
#endif
    return (Bytes){p, size};
}

static ssize_t read_more(int fd, Buffer *b) {
    b->p = grow(b->p, &b->cap, b->n, 65536, 1);
    for (;;) {
        wait_for_input(fd);
        const ssize_t got = interrupted ? -1 : read(fd, b->p + b->n, 65536);
        if (got > 0) b->n += got;
        if (got >= 0 || interrupted || (errno != EINTR && errno != EAGAIN)) return got;
    }
}

static const char *file_read(Buffer *b, const char *path) {
    const int fd = file_open(path, false);
    const size_t start = b->n;
    ssize_t got = fd < 0 ? -1 : 1;
    while (got > 0 && b->n < INT_MAX) got = read_more(fd, b);
    const char *error = got < 0 ? strerror(errno) : "too long, expected less than 2 GB";
    if (fd > STDIN_FILENO) close(fd);
    if (got != 0) return error;
    Bytes text = {b->p + start, b->n - start};
    error = drop_mark(&text);
    if (text.n) memmove(b->p + start, text.p, text.n);
    b->n = start + text.n;
    return error;
}

// It neither reads nor waits. A file that a shell's `while read` loop reads is not at its start.
static bool stdin_has_data(void) {
    int waiting = 0;
    if (file_size(STDIN_FILENO) > 0) return lseek(STDIN_FILENO, 0, SEEK_CUR) == 0;
    return !is_terminal(STDIN_FILENO) && !ioctl(STDIN_FILENO, FIONREAD, &waiting) && waiting > 0;
}

static void write_stdout(Bytes text) {
    while (text.n) {
        const ssize_t n = write(STDOUT_FILENO, text.p, min_size(text.n, 1 << 20));
        if (n >= 0) text = bytes_from(text, n);
        else if (errno == NO_READER) exit(EXIT_SUCCESS);  // it has seen enough
        else if (errno == EAGAIN) poll(&(struct pollfd){STDOUT_FILENO, POLLOUT, 0}, 1, -1);
        else if (errno != EINTR) die("%s: %s", stdout_name, strerror(errno));
    }
}
