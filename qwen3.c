/* qwen3.c - Qwen3 inference in one C file: no packages, just libc, libm and threads. MIT license.

     ./qwen3 model.bin -i "What is the capital of France?"

   A token is a piece of text, often a word or a part of one, and has a number: its id. A language
   model computes for every token of its vocabulary a score: how well would it come next? The
   numbers that it computes this with, the weights, are learned: in training it had to predict each
   next token of very much text, and they were changed little by little so that it did better. This
   program only uses them. (export.py makes model.bin and its tokenizer file from a checkpoint, the
   published files of a trained model.) It cuts a text into tokens (encode_raw, render), runs them
   through the model (prefill, which calls forward), scores all tokens of the vocabulary (classify),
   draws one of them (sample), writes it, runs it through the model as well (advance), and so on
   until the answer ends (generate).

   Inside the model, each token of the text is a vector x (dim). (A name is followed by its shape in
   parentheses.) It starts as the token's row of the embedding table, which has a learned row for
   each token of the vocabulary. Each layer then adds two things to it: what attention finds in this
   token and those before it, and what a feed-forward network (three matrices and a nonlinear
   function) computes from the x that results. So x, the residual stream, is only ever added to, and
   no layer has to pass on what those before it found. For attention, matrices make of each token a
   query q (what it looks for), a key k (what it is found by) and a value v (what it gives to those
   that find it). The dot products of its query with the keys of all positions up to its own are
   turned into shares that add up to 1 (softmax, below); the result is the sum of the values, each
   times its share. This happens n_heads times side by side: each head has its own part of q
   (head_dim), and so weights the positions differently. The KV cache keeps, for each layer, the
   keys K and values V of all earlier positions, a row each. These never change, as no token looks
   at a later one: so each token runs once.

     pos      the token's position
     Wq h     a matrix times a vector
     q . K    the dot products of q with the rows of K
     u * v    the products of two vectors' elements, one by one

   All W, rms_ and _norm are weights. eps and theta are given numbers, mostly 1e-6 and 1e6.

   One layer is as follows. (Its name in HF is Qwen3DecoderLayer. HF, here and below, is Hugging
   Face's Python library transformers, with which the tests compare the results.)

     h = rmsnorm(x, rms_att)                  rmsnorm(x, w) = w * x / sqrt(mean(x^2) + eps)
     q = Wq h, k = Wk h, v = Wv h             q: n_heads vectors (head_dim); k, v: n_kv_heads each
     q = rope(rmsnorm(q, q_norm), pos)        QK-norm, a head at a time: bounds q . k
     k = rope(rmsnorm(k, k_norm), pos)
     K = [K; k], V = [V; v]                   k and v are appended to the KV cache
     a = softmax(q . K / sqrt(head_dim)) V    for each query head; softmax(z) = exp(z) / sum(exp(z))
                                              Without sqrt, q . K would grow with head_dim (as its
                                              root: terms have either sign), and of large numbers
                                              softmax gives nearly all to the largest.
                                              n_heads / n_kv_heads query heads share a K and V, so
                                              that the cache is smaller. All heads' a together are
                                              (q_dim), n_heads * head_dim
     x = x + Wo a
     h = rmsnorm(x, rms_ffn)                  The size of h does not depend on that of x.
     x = x + W2 (silu(W1 h) * (W3 h))         SwiGLU, with silu(z) = z / (1 + exp(-z)); W1 and W3
                                              are (hidden_dim, dim), W2 is (dim, hidden_dim). All
                                              linear, they would be one matrix; so each of
                                              hidden_dim features is let through or not.

   A mixture of experts has many experts, each with its own W1, W2 and W3, and a router Wr, which
   chooses for each token the few that run: so a model has many weights, and a token needs few of
   them. In place of its last line, a layer then computes

     p = softmax(Wr h)                        one p for each expert
     S = the n_experts_used experts with the largest p
     p = p / (sum of p over S)                so that the p of S add up to 1; some models skip this
     x = x + sum of p[e] W2[e] (silu(W1[e] h) * (W3[e] h)) over e in S

   rope rotates each pair (q[j], q[j + head_dim/2]), j < head_dim/2, by the angle
   pos * theta^(-2j / head_dim), and k in the same way, so that q . k depends on the two positions
   only through their distance. Nothing else in attention knows about order: without rope, the same
   keys and values in another order would give the same a. Each pair has a frequency of its own, as
   one would not do: pair 0 turns by 1 radian a position, which tells neighbours apart, but is back
   after some 6; the last pair turns almost theta times as slowly, which tells near from far.

   After the last layer, the scores, called logits, are

     logits = Wcls rmsnorm(x, rms_final)      one for each token of the vocabulary

   softmax(logits) is the probability, by the model, that each token follows the one that x belongs
   to. So an answer's first token comes from the last x of the prompt. The logits of the others are
   needed only to say how well the model predicts a given text (-m perplexity).

   Qwen2 and Qwen2.5 have no QK-norm, but biases: q = Wq h + bq, k = Wk h + bk, v = Wv h + bv.

   A token needs all weights (of the experts, those of the chosen ones). For one token, reading them
   from memory takes longer than the arithmetic. Hence batches and quantization. A batch is tokens
   that run through each layer together, a row each, so that the weights are read once for all. They
   may be neighbours in a prompt: a row needs no more of those before it than their k and v, which
   each layer computes first for all rows. They may also belong to several texts, as rows meet in
   attention only, and there each one sees just the K and V of its own text.

   Quantized weights take fewer bytes, and all matrices but the router are quantized. With 8 bits, a
   group of group_size (up to 256) consecutive weights of a row is stored as int8 values and one
   float scale: a weight is its int8 times the scale. (A large weight makes the steps between values
   coarse, but those of its group alone.) The layers' matrices may have 4 bits instead: the model
   has a table of 16 int8 values, the levels, and a weight is stored as an index into it, its
   group's scale as a float of 16 bits. Just before a quantized matrix is multiplied with a vector,
   the vector is quantized, too, always to 8 bits, which the code writes Q8(h). So the dot product
   of a group of weights and a group of the vector is a sum of integers, at most 256 * 128 * 127 <
   2^22, which is exact even as a float. It is then multiplied by the two scales. So rounding
   happens to the weights, once, in export.py, to each vector, and to the sums of floats.

   Equal bits: a text's results never depend on the number of threads, the cut into batches or other
   texts beside it, as each sum of floats has one fixed order. They do depend on the build: CPUs
   with an instruction for a * b + c (fma) round that once, others twice; and on the C library,
   which has powf, cosf and sinf. Part I defines what Part III computes faster, with the same bits
   but in one place: Part III's attention goes through a text in spans of 256 positions and joins
   their softmaxes, so from position 256 on it rounds differently from attend, its definition (but
   always in the same way).

   To learn how a language model runs, read Part I: the model first, then text to tokens.

   Part I, the model               Part II, the program       Part III, the machine
     Types, with their shapes        Errors and memory          Vector math
     Math                            The model file             Threads
     One layer                       Merging                    The work of a layer
     The whole model: forward()      The tokenizer file         SIMD primitives
     Matrix product and attention    Unicode                    Matrix products
     A mixture of experts            Drafts                     The KV cache and attention
     Text to tokens                  Writing                    The memory of a run
     The chat format                 Conversation               POSIX and Windows
     The sampler                     The modes
     Generation                      JSON
                                     Many texts at once
                                     Options and main                                           */

#if __SIZEOF_POINTER__ < 8 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "qwen3.c needs a 64-bit little-endian machine: models are mapped as they are"
#endif

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
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

typedef struct {  // token ids that grow
    int *p;
    size_t n, cap;
} Ids;

INLINE int min_int(int a, int b) { return a < b ? a : b; }

INLINE int32_t load_i32(const void *p) {  // the 4 bytes at any address p
    int32_t value;
    memcpy(&value, p, 4);
    return value;
}

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
    int group_size;         // values that share a scale; divides dim, q_dim and hidden_dim
    int layer_bits;         // of a weight of the layers' matrices, 8 or 4; the others have 8
    int8_t levels[16];      // with 4 bits: the int8 values that a weight can have
    float rope_theta;
    float rms_norm_eps;
    int rope_scaling;       // 0: none; 2: rope is scaled for longer texts, by the next two (1, in
                            // files of the second edition, is refused: export.py makes new ones)
    float rope_factor;      // on cos and sin
    const float *rope_freq; // (head_dim / 2) radians per position
    int qkv_bias;           // 1: Wq, Wk and Wv have biases (Qwen2)
    int no_qk_norm;         // 1: no QK-norm (Qwen2)
    int n_experts;          // 0: not a mixture of experts; HF num_experts
    int n_experts_used;     // by each token; HF num_experts_per_tok
    int no_topk_norm;       // 1: p is not divided by its sum; HF norm_topk_prob = false
    int q_dim, kv_dim;      // n_heads * head_dim, n_kv_heads * head_dim
} Config;

// A quantized matrix: weight (r, i) is weight_q(r, i) * weight_scale(r, i / group), two functions
// of the section Matrix product and attention.
typedef struct {
    int rows, cols, group, bits;
    const int8_t *bytes;   // (rows, cols * bits / 8)  8 bits: int8; 4: two weights in a byte. (Not
                           // uint8_t: GCC 12 makes wrong code of dot_row with VNNI.)
    const void *scales;    // (rows, cols / group)     with 8 bits floats, with 4 half_floats
    const int8_t *levels;  // (16) with 4 bits         the int8 that a nibble stands for
} Matrix;

typedef struct {
    const float *rms_att, *rms_ffn;  // (dim)                 {input,post_attention}_layernorm
    const float *q_norm, *k_norm;    // (head_dim) or NULL    self_attn.{q,k}_norm
    const float *bq;                 // (q_dim) or NULL       self_attn.q_proj.bias
    const float *bk, *bv;            // (kv_dim) or NULL      self_attn.{k,v}_proj.bias
    Matrix wq;                       // (q_dim, dim)          self_attn.q_proj
    Matrix wk, wv;                   // (kv_dim, dim)         self_attn.{k,v}_proj
    Matrix wo;                       // (dim, q_dim)          self_attn.o_proj
    Matrix w1, w3;                   // (hidden_dim, dim)     mlp.{gate,up}_proj
    Matrix w2;                       // (dim, hidden_dim)     mlp.down_proj
    // With experts, w1, w3 and w2 hold the rows of expert 0, then those of expert 1, and so on.
    const float *router;             // (n_experts, dim) or NULL    mlp.gate
} Layer;

typedef struct {
    Matrix embedding;        // (vocab_size, dim)             model.embed_tokens
    Layer *layers;           // (n_layers)                    model.layers.N
    const float *rms_final;  // (dim)                         model.norm
    Matrix classifier;       // (vocab_size, dim)             lm_head, Wcls
} Weights;

// Q8 of several vectors (cols). In memory, each is one record of 4 * stride bytes: its q8, then its
// scales, then its bias_fix. The pointers are those of vector 0: see quantized_row.
typedef struct {
    int8_t *q8;         // (cols)          the int8 values
    float *scale;       // (cols / group)
    int32_t *bias_fix;  // (cols / group)  Part III only: see dot4
    size_t stride;      // from a record to the next, in floats
} Quantized;

typedef struct {   // a text that runs through the model
    Ids ids;       // its tokens whose keys and values are in the KV cache; in a list (Part II) also
                   // those that follow
    int *blocks;   // where they are: position pos is in block blocks[pos / block_len] of the cache
} Text;

typedef struct {       // a row of a batch: a token of a text
    int token;         // the token's id
    int pos;           // its position in the text
    const Text *text;
    bool needed;       // x is needed after the last layer: see keep_needed
} Row;

// Everything that changes while the model runs. A batch has consecutive tokens of one text, or such
// parts of several texts one after the other. A long prompt is cut into batches.
typedef struct {
    int seq_len;         // the maximum number of positions of a text (option -c)
    int batch;           // the maximum number of tokens in a batch
    Row *rows;           // (batch)               row t of all that follows belongs to rows[t]
    float *cos, *sin;    // (batch, head_dim / 2) of the angles of rope at that position
    float *x;            // (batch, dim)          the residual stream
    float *h;            // (batch, dim)          rmsnorm(x); with experts then their outputs' sum
    Quantized xq;        // (batch, dim)          Q8(h)
    float *q;            // (batch, q_dim)        the queries
    float *a;            // (batch, q_dim)        what attention finds for each query
    Quantized aq;        // (batch, q_dim)        Q8(a)
    Quantized hq;        // (batch, hidden_dim)   Q8(silu(W1 h) * (W3 h)); with experts
                         // (batch * n_experts_used, hidden_dim)
    float *logits;       // (logit_rows, vocab_size)
    int logit_rows;      // the maximum number of rows that one call of classify scores
    float *cache;        // blocks of block_len positions, see Text. A block has, for each
                         // layer and kv head, K and V (block_len, head_dim); Part III orders them
    int blocks, block_len;
    int passes;          // forward passes so far; only the tests read it
    // Part III only:
    struct Routing *routing;          // which experts run for which tokens
    struct Workspace *workspace;      // (threads)
} State;

typedef struct {
    Config config;
    Weights weights;
    State state;
} Model;

typedef struct Pass {   // a batch on its way through one layer
    const Config *c;
    const State *s;
    int l;              // the layer's number
    const Layer *w;     // and its weights
    int n;              // rows in the batch
    const float *norm;  // (dim) the weights of the norm that runs
    void (*step)(const struct Pass *p, int i);  // what runs for each i: see each
} Pass;

// ------------------------------------------------------------------------------------------------
// Math: what a layer computes on one vector. Compilers vectorize these loops, and those of the
// functions that are only declared here (Part III).

// a * b + c, rounded once in builds with fma. Nothing else is: the Makefile says -ffp-contract=off.
static float mul_add(float a, float b, float c);

// exp(x), with an error of at most 2 units in the last place; 0 for x < -87.7, exp(88) for x > 88
static float fast_exp(float x);

// The largest of x (n > 0)
static float max_of(const float *x, int n);

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

// out = w * x / sqrt(mean(x^2) + eps), all (n): HF Qwen3RMSNorm
static void rmsnorm(float *out, const float *x, const float *w, int n, float eps) {
    float scale = 1 / sqrtf(sum_of(x, n, true) / n + eps);
    for (int i = 0; i < n; i++) out[i] = w[i] * (x[i] * scale);
}

// gate = silu(gate) * up, all (n): HF Qwen3MLP
static void silu_times(float *gate, const float *up, int n) {
    for (int i = 0; i < n; i++) gate[i] = gate[i] / (1 + fast_exp(-gate[i])) * up[i];
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

// A view of x that begins at vector t
INLINE Quantized quantized_row(const Quantized *x, int t) {
    const size_t at = t * x->stride;
    return (Quantized){x->q8 + 4 * at, x->scale + at, x->bias_fix + at, x->stride};
}

// Q8(x): quantizes x (n) into columns at .. at + n - 1 of row t of out. For each group, the scale
// is max|x| / 127, and a value is x * (127 / max|x|), rounded to the nearest integer. A group whose
// scale would be below the smallest normal number becomes zeros. One with an infinity gets values 0
// and an infinite scale, one with a NaN a scale of NaN: both make every product NaN.
static void quantize(const Quantized *out, int t, int at, const float *x, int n, int group);

// ------------------------------------------------------------------------------------------------
// One layer: one function for each step. Most of them run on all threads. Part III provides what is
// only declared here.

// Calls step(p, i) for i = 0 .. count - 1, on all threads, `chunk` neighbours at a time. Returns
// when all are done.
typedef void (*Step)(const Pass *p, int i);
static void each(Pass *p, Step step, int count, int chunk);

// out = W x for n vectors, or out += W x: dot_row (see Matrix product and attention) of each row
// and vector, on all threads. out (n, rows), W (rows, cols), x (n, cols)
static void matmul(const State *s, float *out, const Matrix *w, const Quantized *x, int n,
                   bool add);

// From row `from` of x, makes row `to` of h = rmsnorm(x, w) and of xq = Q8(h).
static void norm_row(const Config *c, const State *s, const float *w, int from, int to) {
    float *h = s->h + (size_t)to * c->dim;
    rmsnorm(h, s->x + (size_t)from * c->dim, w, c->dim, c->rms_norm_eps);
    quantize(&s->xq, to, 0, h, c->dim, c->group_size);
}

static void norm_step(const Pass *p, int t) { norm_row(p->c, p->s, p->norm, t, t); }

// h = rmsnorm(x, w), xq = Q8(h)
static void norm(Pass *p, const float *w) {
    p->norm = w;
    each(p, norm_step, p->n, 4);
}

// One head of W xq + bias, where W is Wq, Wk or Wv, for all rows. Row t's head_dim values go to
// out + t * stride.
static void project(const Pass *p, float *out, int stride, const Matrix *w, const float *bias,
                    int head);

// Room for (batch, head_dim) floats that the calling thread has for itself
static float *scratch(const State *s);

// Where element j of the key, or of the value, of position pos of a text is in the KV cache, in p's
// layer
static float *key_at(const Pass *p, const Text *text, int kv_head, int pos, int j);
static float *value_at(const Pass *p, const Text *text, int kv_head, int pos, int j);

// qk (head_dim), one head's q or k of row t, becomes rope(rmsnorm(qk)). norm_weight is NULL in
// models without QK-norm.
static void norm_and_rope(const Pass *p, float *qk, const float *norm_weight, int t) {
    const int head_dim = p->c->head_dim, half = head_dim / 2;
    if (norm_weight) rmsnorm(qk, qk, norm_weight, head_dim, p->c->rms_norm_eps);
    rope(qk, p->s->cos + (size_t)t * half, p->s->sin + (size_t)t * half, half);
}

static void q_head(const Pass *p, int head) {
    const int q_dim = p->c->q_dim;
    float *q = p->s->q + head * p->c->head_dim;
    project(p, q, q_dim, &p->w->wq, p->w->bq, head);
    for (int t = 0; t < p->n; t++) norm_and_rope(p, q + (size_t)t * q_dim, p->w->q_norm, t);
}

static void k_head(const Pass *p, int kv_head) {
    const int head_dim = p->c->head_dim;
    float *k = scratch(p->s);
    project(p, k, head_dim, &p->w->wk, p->w->bk, kv_head);
    for (int t = 0; t < p->n; t++, k += head_dim) {
        const Row *row = &p->s->rows[t];
        norm_and_rope(p, k, p->w->k_norm, t);
        for (int j = 0; j < head_dim; j++) *key_at(p, row->text, kv_head, row->pos, j) = k[j];
    }
}

static void v_head(const Pass *p, int kv_head) {
    const int head_dim = p->c->head_dim;
    float *v = scratch(p->s);
    project(p, v, head_dim, &p->w->wv, p->w->bv, kv_head);
    for (int t = 0; t < p->n; t++, v += head_dim) {
        const Row *row = &p->s->rows[t];
        for (int j = 0; j < head_dim; j++) *value_at(p, row->text, kv_head, row->pos, j) = v[j];
    }
}

// Head i of all: first those of k, then those of v, then those of q. One thread projects a head for
// all rows and then finishes it, while it is in that core's caches.
static void any_head(const Pass *p, int i) {
    const int n_kv_heads = p->c->n_kv_heads;
    if (i < n_kv_heads) k_head(p, i);
    else if (i < 2 * n_kv_heads) v_head(p, i - n_kv_heads);
    else q_head(p, i - 2 * n_kv_heads);
}

// Moves the rows that are needed after the last layer to the front, and forgets the others.
static void keep_needed(Pass *p) {
    const int dim = p->c->dim, half = p->c->head_dim / 2;
    const State *s = p->s;
    int n = 0;
    for (int t = 0; t < p->n; t++) {
        if (!s->rows[t].needed) continue;
        s->rows[n] = s->rows[t];
        memmove(s->x + (size_t)n * dim, s->x + (size_t)t * dim, dim * sizeof(float));
        memmove(s->cos + (size_t)n * half, s->cos + (size_t)t * half, half * sizeof(float));
        memmove(s->sin + (size_t)n * half, s->sin + (size_t)t * half, half * sizeof(float));
        memmove(quantized_row(&s->xq, n).q8, quantized_row(&s->xq, t).q8, s->xq.stride * 4);
        n++;
    }
    p->n = n;
}

// q = rope(rmsnorm(Wq xq)), k = rope(rmsnorm(Wk xq)), v = Wv xq; k and v go to the KV cache. Other
// tokens read a token only through its k and v. So in the last layer all rows store these, but
// everything else runs only for the rows that are needed, perhaps none.
static void qkv(Pass *p) {
    const Config *c = p->c;
    const bool last = p->l == c->n_layers - 1;
    each(p, any_head, 2 * c->n_kv_heads + (last ? 0 : c->n_heads), 1);
    if (!last) return;
    keep_needed(p);
    each(p, q_head, c->n_heads, 1);
}

// attend (see Matrix product and attention), for all query heads of all rows
static void attend_all(Pass *p);

static void quantize_a(const Pass *p, int t) {
    const int q_dim = p->c->q_dim;
    quantize(&p->s->aq, t, 0, p->s->a + (size_t)t * q_dim, q_dim, p->c->group_size);
}

// aq = Q8(a), a = softmax(q . K / sqrt(head_dim)) V
static void attention(Pass *p) {
    attend_all(p);
    each(p, quantize_a, p->n, 4);
}

// x = x + W y
static void matmul_add(const Pass *p, const Matrix *w, const Quantized *y) {
    matmul(p->s, p->s->x, w, y, p->n, true);
}

// hq = Q8(silu(W1 xq) * (W3 xq)); in Part III, some columns at a time
static void swiglu(Pass *p);

// x = x + sum of p[e] W2[e] Q8(silu(W1[e] xq) * (W3[e] xq)) over the experts e that choose_experts
// (below) chooses
static void experts(Pass *p);

// ------------------------------------------------------------------------------------------------
// The whole model: the layers one after the other, then the scores

// The int8 of weight (r, i), and the scale of group g of row r: see Matrix product and attention.
static int weight_q(const Matrix *w, int r, int i, int group);
static float weight_scale(const Matrix *w, int r, int g, int group);

// The frequency of pair j in radians per position: theta^(-2j / head_dim). If rope is scaled, for
// longer texts than those of the model's training (YaRN, arXiv 2309.00071), the file has others,
// and a factor on cos and sin, which makes q . k larger. export.py computes them.
static float rope_frequency(const Config *c, int j) {
    return c->rope_scaling ? c->rope_freq[j] : 1 / powf(c->rope_theta, 2 * j / (float)c->head_dim);
}

// Prepares row t of a batch: x, the token's row of the embedding table; and the cos and sin of the
// rope angles of its position.
static void embed(Model *m, int t) {
    const Matrix *table = &m->weights.embedding;
    const Config *c = &m->config;
    const State *s = &m->state;
    const int token = s->rows[t].token, pos = s->rows[t].pos;
    const int dim = c->dim, group = c->group_size, half = c->head_dim / 2;
    const float factor = c->rope_scaling ? c->rope_factor : 1;
    for (int i = 0; i < dim; i++) {
        const float scale = weight_scale(table, token, i / group, group);
        s->x[(size_t)t * dim + i] = weight_q(table, token, i, group) * scale;
    }
    for (int j = 0; j < half; j++) {
        const float angle = (float)pos * rope_frequency(c, j);
        s->cos[(size_t)t * half + j] = cosf(angle) * factor;
        s->sin[(size_t)t * half + j] = sinf(angle) * factor;
    }
}

// The progress display of a long text. progress_start: `tokens` tokens are about to run.
// progress_add: n have finished one more layer. progress_end clears it.
static void progress_start(const Model *m, size_t tokens);
static void progress_add(int n);
static void progress_end(void);

// Runs State.rows 0 .. n - 1, n <= batch. The rows of a text stand together, in order; the cache
// must hold the positions before them, and afterwards holds these as well. Then the first rows of x
// are the last layer's output of those rows that are needed. Returns false after Ctrl-C.
static bool forward(Model *m, int n) {
    State *s = &m->state;
    Pass p = {.c = &m->config, .s = s, .n = n};
    s->passes++;
    for (int t = 0; t < n; t++) embed(m, t);

    for (p.l = 0; p.l < m->config.n_layers; p.l++) {
        if (interrupted) return false;
        p.w = &m->weights.layers[p.l];
        norm(&p, p.w->rms_att);            // xq = Q8(rmsnorm(x))
        qkv(&p);                           // q = rope(rmsnorm(Wq xq)); k, v go to the cache
        attention(&p);                     // aq = Q8(softmax(q . K / sqrt(head_dim)) V)
        matmul_add(&p, &p.w->wo, &s->aq);  // x = x + Wo aq

        norm(&p, p.w->rms_ffn);            // xq = Q8(rmsnorm(x))
        if (p.w->router) {
            experts(&p);                       // x = x + the outputs of the chosen experts
        } else {
            swiglu(&p);                        // hq = Q8(silu(W1 xq) * (W3 xq))
            matmul_add(&p, &p.w->w2, &s->hq);  // x = x + W2 hq
        }
        progress_add(n);
    }
    return true;
}

// Runs n tokens of one text from position pos on. The last `needed` of them are needed.
static bool forward_text(Model *m, const Text *text, const int *tokens, int n, int pos,
                         int needed) {
    for (int t = 0; t < n; t++) {
        m->state.rows[t] = (Row){tokens[t], pos + t, text, t >= n - needed};
    }
    return forward(m, n);
}

// Computes logits (count, vocab_size) = Wcls Q8(rmsnorm(x, rms_final)) for rows first ..
// first + count - 1 of x; count is at most logit_rows. Overwrites h and xq.
static float *classify(Model *m, int first, int count) {
    const State *s = &m->state;
    for (int t = 0; t < count; t++) norm_row(&m->config, s, m->weights.rms_final, first + t, t);
    matmul(s, s->logits, &m->weights.classifier, &s->xq, count, false);
    return s->logits;
}

// ------------------------------------------------------------------------------------------------
// Matrix product and attention, in plain C: dot_row defines what Part III's matmul computes, attend
// what attend_all does. These two are faster, as they work on several sums at once, each in the
// order that it has here (but for attend_all's spans, see the top). dot_row runs in tests only,
// attend also in `make journey`.

// The int8 of weight (r, i). With 4 bits, a group takes group / 2 bytes. Byte b holds two indices
// into levels: in its low nibble that of the group's weight b, in its high one that of weight b +
// group / 2. group equals w->group; callers pass it as a constant, so that the compiler can unroll.
INLINE int weight_q(const Matrix *w, int r, int i, const int group) {
    const size_t at = (size_t)r * w->cols + i;
    if (w->bits == 8) return w->bytes[at];
    const int j = i % group, half = group / 2;               // j: the place in the group
    const uint8_t pair = w->bytes[(at - j) / 2 + j % half];  // (at - j) / 2: its first byte
    return w->levels[j < half ? pair & 15 : pair >> 4];
}

INLINE float weight_scale(const Matrix *w, int r, int g, const int group) {
    const size_t at = (size_t)r * (w->cols / group) + g;
    return w->bits == 8 ? ((const float *)w->scales)[at]
                        : half_float(((const uint16_t *)w->scales)[at]);
}

// W[r] . x[t]: row r of W, vector t of x. The products of a group are added as integers, the groups
// as floats, from the first to the last.
INLINE float dot_row(const Matrix *w, int r, const Quantized *x, int t, const int group) {
    const Quantized x_row = quantized_row(x, t);
    float sum = 0;
    for (int g = 0; g < w->cols / group; g++) {
        int32_t dot = 0;
        for (int i = g * group; i < (g + 1) * group; i++) {
            dot += weight_q(w, r, i, group) * x_row.q8[i];
        }
        sum = mul_add((float)dot * weight_scale(w, r, g, group), x_row.scale[g], sum);
    }
    return sum;
}

// Replaces x (n) by exp(x - max), where max is max_of(x, n), and returns the sum; dividing by it
// completes the softmax: exp(max) cancels, and without it exp(x) could be infinite.
static float softmax_terms(float *x, int n, float max) {
    for (int i = 0; i < n; i++) x[i] = fast_exp(x[i] - max);
    return sum_of(x, n, false);
}

// Attention of one query head of row t: a = softmax(q . K / sqrt(head_dim)) V with q and a
// (head_dim), K and V (len, head_dim). score (seq_len) is overwritten.
INLINE void attend(const Pass *p, int t, int head, float *score) {
    const Config *c = p->c;
    const State *s = p->s;
    const int kv_head = head / (c->n_heads / c->n_kv_heads);
    const Text *text = s->rows[t].text;
    const int len = s->rows[t].pos + 1;  // causal: a token sees itself and those before it
    const float *q = s->q + (size_t)t * c->q_dim + head * c->head_dim;
    float *a = s->a + (size_t)t * c->q_dim + head * c->head_dim;
    for (int i = 0; i < len; i++) {
        float dot = 0;
        for (int j = 0; j < c->head_dim; j++) {
            dot = mul_add(*key_at(p, text, kv_head, i, j), q[j], dot);
        }
        score[i] = dot * (1 / sqrtf((float)c->head_dim));
    }
    const float total = softmax_terms(score, len, max_of(score, len));
    for (int j = 0; j < c->head_dim; j++) {
        float sum = 0;
        for (int i = 0; i < len; i++) {
            sum = mul_add(*value_at(p, text, kv_head, i, j), score[i], sum);
        }
        a[j] = sum * (1 / total);
    }
}

// ------------------------------------------------------------------------------------------------
// A mixture of experts (HF Qwen3MoeSparseMoeBlock). The tokens of a batch choose different experts.
// An expert runs for all tokens that chose it together, so that its weights are read once: that is
// in Part III, which adds p[e] times the output of each expert e in ascending order of e.

// share (n_experts), Wr h of one token, becomes p of the n_experts_used experts with the largest p
// (of equal ones the first) and 0 of all others. Returns false if the softmax is NaN (an
// element is infinity or NaN): then the token has no experts, all of share is 0.
static bool choose_experts(const Config *c, float *share) {
    const float all = softmax_terms(share, c->n_experts, max_of(share, c->n_experts));
    float chosen = 0;
    if (isnan(all)) {
        memset(share, 0, c->n_experts * sizeof(float));
        return false;
    }
    for (int i = 0; i < c->n_experts_used; i++) {
        int best = 0;
        for (int e = 1; e < c->n_experts; e++) best = share[e] > share[best] ? e : best;
        chosen += share[best];
        share[best] = -share[best];  // the sign marks it as chosen; a p that is 0 adds nothing
    }
    const float divisor = c->no_topk_norm ? all : chosen;
    for (int e = 0; e < c->n_experts; e++) share[e] = share[e] < 0 ? -share[e] / divisor : 0;
    return true;
}

// ------------------------------------------------------------------------------------------------
// Text to tokens. The text is cut at added tokens: marks such as <|im_start|>, a token each, which
// tell the model what no text can: here begins a message. (In what a user writes in a chat, their
// spelling is plain text.) Between them it is normalized: in Unicode's form NFC, e and a combining
// accent (U+0301) become one character (U+00E9), so that both spellings get the same ids. Then a
// regular expression cuts it into pieces, mostly words: "Hello, world" becomes "Hello", "," and "
// world". Then byte-pair encoding: each byte of a piece begins as a token of its own; as long as
// two neighbours together are a token of the vocabulary, the pair whose token has the highest score
// is merged: l o w e r -> lo w e r -> lo w er -> low er -> lower. (This score is the merge's
// priority, and none of the model's scores.) Vocabulary and scores were made before training, from
// the most frequent pairs of its text: the model only knows texts that are cut in this way.

typedef struct {  // a view of bytes that something else owns. Texts are never NUL-terminated here.
    const uint8_t *p;
    size_t n;
} Bytes;

typedef struct {  // bytes that grow
    uint8_t *p;
    size_t n, cap;
} Buffer;

static void buffer_add(Buffer *b, Bytes text);
static void ids_add(Ids *ids, int id);

static Bytes bytes(const char *s) { return (Bytes){(const uint8_t *)s, strlen(s)}; }
static Bytes bytes_of(const Buffer *b) { return (Bytes){b->p, b->n}; }

static Bytes bytes_from(Bytes b, size_t start) {  // b.p may be NULL if `start` is 0
    return (Bytes){start ? b.p + start : b.p, b.n - start};
}

enum { OTHER, LETTER, NUMBER, SPACE, END };  // classes of characters; END: after the text
enum {           // bits of Tokenizer.kind
    ADDED = 1,   // an added token, found before the text is cut into pieces
    SPECIAL = 2  // not written in answers
};
enum { SYSTEM, USER, ASSISTANT };
typedef enum { CHAT, GENERATE, TOKENIZE, PERPLEXITY, EMBED, N_MODES } Mode;

typedef struct { uint64_t from, to; } Mapping;  // in tables sorted by `from`

typedef struct {       // the text around the messages of a conversation: see render
    Bytes start;       // before all else
    Bytes no_system;   // then, if the first message is not a system message
    Bytes open[3];     // before a message, by role
    Bytes close[3];    // after it
    Bytes answer[2];   // where the model's answer begins: thinking (see chatml) off, on
    Bytes strip;       // </think>: everything up to the last one is cut from an earlier answer
    Bytes trim;        // and then any of these characters from the start of the rest
} ChatFormat;

typedef struct Tokenizer {
    int vocab_size;          // that of Config, of which tokenizer_load gets it
    Bytes *text;             // (vocab_size)
    float *score;            // (vocab_size) of the merge that makes the token: higher ones first
    uint8_t *kind;           // (vocab_size) ADDED, SPECIAL
    size_t longest;          // the most bytes of a token
    bool added_start[256];   // the bytes that added tokens begin with
    size_t longest_added;    // the bytes of the longest one
    int end_of_text;         // <|endoftext|>
    int think, end_think;    // <think> and </think>, or -1
    Ids head, tail;          // put before and after every raw text
    Ids stop;                // each ends an answer
    float temperature, top_p, repetition;  // the checkpoint's advice: see Sampler
    int top_k;
    Mode mode;               // what the model is made for
    ChatFormat chat;
    bool has_classes;        // the file has the classes of characters
    // Part II only, for token_find, char_at and normalize:
    uint32_t *table;         // (mask + 1) hash table of the tokens: id + 1, or 0 if free
    uint32_t mask;
    uint64_t secret;         // of the hash, odd: nobody can make a file whose tokens share slots
    uint16_t *chars;         // (N_CHARS) what each character is
    uint64_t *decomposed;    // (N_CHARS) canonical decompositions: first << 32 | second, or 0
    Mapping *composed;       // (n_composed) and back, for those that NFC composes again
    size_t n_composed;
} Tokenizer;

typedef struct {  // one character of a text
    uint32_t c;   // code point; a byte that is not valid UTF-8 gets a number above all of them
    int n;        // its bytes; 0 after the text
    int class;    // OTHER, LETTER, NUMBER, SPACE or END
    bool active;  // normalization may change it: see normalize
} Char;

// Part II: the character at offset `at` of a text; at the text's end, 0 bytes of class END
static Char char_at(const Tokenizer *tok, Bytes text, size_t at);

// Part II: appends a text in form NFC.
static void normalize(const Tokenizer *tok, Buffer *out, Bytes text);

// Part II: the added token, or the ordinary one, with exactly these bytes, or -1
static int token_find(const Tokenizer *tok, Bytes text, bool added);

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
//   5-7 \s*[\r\n]+  or  \s+(?!\S)  or  \s+
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

typedef struct Symbol Symbol;

typedef struct {      // text arrives in parts, some of which may hold added tokens
    const Tokenizer *tok;
    Ids *out;
    Buffer plain;     // the text since the last added token, not encoded yet
    Buffer normal;    // its NFC
    Symbol *symbols;  // Part II only: see encode_piece
    size_t symbols_cap;
} Encoder;

// Part II: byte-pair encoding. Merges the pair with the highest score, of equal ones the leftmost,
// until no two neighbours of the piece make a token; then appends its tokens to enc->out.
static void encode_piece(Encoder *enc, Bytes piece);

// Encodes the plain text that has arrived.
static void encode_flush(Encoder *enc) {
    Bytes text = bytes_of(&enc->plain);
    if (enc->tok->decomposed) {  // the file has the data for NFC
        enc->normal.n = 0;
        normalize(enc->tok, &enc->normal, text);
        text = bytes_of(&enc->normal);
    }
    // NFC may have made it longer. A byte makes at most one token, so all counts fit into an int.
    if (text.n + enc->out->n >= INT_MAX) die("text: too long, expected less than 2 GB");
    while (text.n && !interrupted) {  // then ids are missing, but forward stops as well
        size_t n = piece_length(enc->tok, text);
        encode_piece(enc, (Bytes){text.p, n});
        text = bytes_from(text, n);
    }
    enc->plain.n = 0;
}

static void encode_token(Encoder *enc, int id) {
    encode_flush(enc);
    ids_add(enc->out, id);
}

// Adds plain text, which encode_flush will encode. An added token spelled out in it, such as
// <|im_end|>, stays plain text; so a user, whose text comes here, can't forge the chat format.
static void encode_plain(Encoder *enc, Bytes text) { buffer_add(&enc->plain, text); }

// Returns the first added token at or after *at, the longest if several begin there, and sets *at
// to its offset. If there is none, returns -1, and *at is the end of the text.
static int added_next(const Tokenizer *tok, Bytes text, size_t *at) {
    for (; *at < text.n && !interrupted; ++*at) {
        if (!tok->added_start[text.p[*at]]) continue;
        for (size_t n = tok->longest_added; n > 0; n--) {
            if (n > text.n - *at) continue;
            const int id = token_find(tok, (Bytes){text.p + *at, n}, true);
            if (id >= 0) return id;
        }
    }
    return -1;
}

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

static void encoder_free(Encoder *enc) {
    free(enc->plain.p);
    free(enc->normal.p);
    free(enc->symbols);
}

// A raw text (in all modes but chat), as HF's tokenizer(text) encodes it: with added tokens, and
// with what its post-processor puts around every text.
static void encode_raw(const Tokenizer *tok, Bytes text, Ids *out) {
    Encoder enc = {.tok = tok, .out = out};
    for (size_t i = 0; i < tok->head.n; i++) ids_add(out, tok->head.p[i]);
    encode_marked(&enc, text);
    encode_flush(&enc);
    for (size_t i = 0; i < tok->tail.n; i++) ids_add(out, tok->tail.p[i]);
    encoder_free(&enc);
}

// ------------------------------------------------------------------------------------------------
// The chat format. A conversation is a list of messages. A chat model was trained on conversations
// written in one form, which its checkpoint has as a program, the chat template. So the prompt of
// each turn is all messages in that form, up to where the model's answer begins, for example
//   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n
//   <|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n
// (one after the other). The model goes on from there, and ends its answer with <|im_end|>.
//
// export.py has turned the template into a ChatFormat. Each turn encodes the whole conversation
// anew; prefill then skips the beginning that the cache holds already. (Where a <think> block, even
// an empty one, preceded the last answer, the next turn leaves it out, as the template does. The
// tokens behind it then have other positions and see other tokens, so they run again.)

typedef struct {
    int role;     // SYSTEM (instructions for all of it), USER or ASSISTANT (the model)
    Ids ids;      // of an answer: the tokens that the model drew
    Buffer text;  // of other messages: what the user gave. Of an answer, what follows its ids: the
                  // beginning of a token that the option -x cut; or all of it, if the conversation
                  // comes from a file (-L)
} Message;

typedef struct {
    Message *p;
    size_t n, cap;
} Conversation;

// ChatML, which all Qwen models speak: for files without a chat format. Some models think before
// they answer: they write how they get there, between <think> and </think>. Where the vocabulary
// has these tokens, an empty block turns thinking off.
static ChatFormat chatml(bool has_think) {
    Bytes end = bytes("<|im_end|>\n"), answer = bytes("<|im_start|>assistant\n");
    Bytes no_think = bytes("<|im_start|>assistant\n<think>\n\n</think>\n\n");
    return (ChatFormat){
        .open = {bytes("<|im_start|>system\n"), bytes("<|im_start|>user\n"), answer},
        .close = {end, end, end},
        .answer = {has_think ? no_think : answer, answer},
        .strip = bytes("</think>"), .trim = bytes("\n")};
}

// The offset just after the last occurrence of `part` in `text`, or 0 if there is none
static size_t find_last(Bytes text, Bytes part) {
    for (size_t end = text.n; part.n && end >= part.n; end--) {
        if (memcmp(text.p + end - part.n, part.p, part.n) == 0) return end;
    }
    return 0;
}

// Adds an answer of an earlier turn, without its thinking. Like the chat template, it works on the
// text: the answer's text is encoded again, and its ids can differ from those that the model drew.
// Only added tokens keep their ids.
static void encode_answer(Encoder *enc, const ChatFormat *f, const Message *message) {
    const Ids *ids = &message->ids;
    Buffer all = {0};
    for (size_t i = 0; i < ids->n; i++) buffer_add(&all, enc->tok->text[ids->p[i]]);
    buffer_add(&all, bytes_of(&message->text));
    Bytes text = bytes_of(&all);
    size_t start = find_last(text, f->strip), at = 0;  // bytes to skip; bytes before token i
    while (start && start < text.n && f->trim.n && memchr(f->trim.p, text.p[start], f->trim.n))
        start++;
    for (size_t i = 0; i < ids->n; i++) {
        int id = ids->p[i];
        Bytes token = enc->tok->text[id];
        size_t cut = at < start ? start - at : 0;  // bytes of this token to skip
        if (cut == 0 && enc->tok->kind[id] & ADDED) encode_token(enc, id);
        else if (cut < token.n) encode_plain(enc, bytes_from(token, cut));
        at += token.n;
    }
    if (start < text.n) encode_plain(enc, bytes_from(text, start > at ? start : at));
    free(all.p);
}

// The ids of a conversation, up to where the model's answer begins. Messages before number `first`
// are left out, but for a system message: so a conversation that has grown longer than the context
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
    encode_flush(&enc);
    encoder_free(&enc);
}

// ------------------------------------------------------------------------------------------------
// The sampler: repetition penalty, presence penalty (which HF lacks), temperature, top-k, top-p, in
// HF's order. (The likeliest token each time makes texts dull, which repeat themselves; so one is
// drawn.) The last two cut off the very many unlikely tokens, one of which would else be drawn now
// and then. Tokens are ordered by probability, equal ones by id. Nothing is sorted: each step
// is a loop over the whole vocabulary that compilers vectorize, so the time hardly depends on the
// distribution.

typedef struct {
    float temperature;  // divides the logits: below 1 likely tokens become still likelier, above 1
                        // less likely; 0: always the most likely one
    float top_p;        // keep the smallest set that reaches this probability, the nucleus
    int top_k;          // keep the k most likely tokens, 0: all
    float presence;     // subtracted from the logits of tokens that are in the answer
    float repetition;   // makes tokens of the prompt and the answer less likely, 1: off
    bool *answered;     // (vocab_size) is in the answer
    bool *seen;         // (vocab_size) is in the prompt or the answer
    uint64_t rng;
} Sampler;

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

// Sets all p but the k largest to 0. Bisection on the bits finds a threshold that at least k values
// reach: exactly k, or more only if several are equal there.
static void keep_top_k(float *p, int n, int k) {
    // Invariant: fewer than k values are >= high; `kept` values, at least k, are >= low.
    int32_t low = 0, high = INT32_MAX;
    int kept = n;
    while (kept > k && high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        int count = 0;
        for (int i = 0; i < n; i++) count += load_i32(p + i) >= middle;
        if (count < k) {
            high = middle;
        } else {
            low = middle;
            kept = count;
        }
    }
    for (int i = 0; i < n; i++) p[i] = load_i32(p + i) >= low ? p[i] : 0;
    for (int i = n - 1; kept > k; i--) {  // too many equal ones: the lowest ids stay
        if (load_i32(p + i) != low) continue;
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

// Draws the next token by its logits (n), which are overwritten; -1 if they are not finite. Nucleus
// sampling (top_p must be > 0) needs no sorting. Let the total be the sum of all p before the first
// draw. Draw a token. If the tokens likelier than it sum to less than top_p * total, it is in the
// nucleus: return it. Else discard it and all less likely tokens, and draw again. No token of the
// nucleus is discarded before the draw that counts, so their proportions stay right.
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

typedef struct Engine Engine;
typedef struct Writer Writer;

// Writes a token's text. Returns false if the option -x TEXT ends the answer here: as soon as TEXT
// comes, nothing from it on is written.
static bool writer_token(Writer *out, const Tokenizer *tok, int id);

// Runs a drawn token through the model and appends it to the answer's text. Returns the logits of
// the next token, or NULL after Ctrl-C. In principle, with text = &e->answer.text and
// pos = text->ids.n, this is
//   forward_text(m, text, &id, 1, pos, 1); ids_add(&text->ids, id); return classify(m, 0, 1);
// Part II adds a kind of speculative decoding, which is faster: where the text repeats itself, it
// guesses the next tokens, a draft, and runs them with id in one pass, a row each. As long as each
// token that is drawn is the one that was guessed, its logits are there, without a pass. The first
// other one begins a new pass, and what follows in the draft is overwritten. So the results are the
// same. advance_start forgets the last answer's draft.
static float *advance(Engine *e, int id);
static void advance_start(Engine *e);

// ------------------------------------------------------------------------------------------------
// Generation: one loop for chat and for raw text. (Part II has a second one, which runs the answers
// of many texts together.) An answer is (respond in Part II)
//   render(tok, conversation, 0, think, &ids);  the prompt; a raw text: encode_raw(tok, text, &ids)
//   prefill(e, &ids);                           runs it, but for what the cache holds
//   generate(e, &drawn);                        draws, writes and runs one token after the other

#define NOT_FINITE "model: the logits are not finite; is the file damaged?"
#define BAD_VECTOR "model: the vector is not finite; is the file damaged?"

typedef enum { GOES_ON, TURN_ENDED, LIMIT_REACHED, CONTEXT_ENDED, INTERRUPTED } Ending;

typedef struct {
    Text text;        // the prompt, then the answer's tokens
    Sampler sampler;
    Writer *writer;   // where it goes
    Ids *drawn;       // its tokens
} Answer;

struct Engine {
    Model model;
    Tokenizer tokenizer;
    int max_new;      // the maximum number of tokens in an answer, -1: no limit
    Answer answer;    // of the conversation. Its text is allocated once, with room for seq_len + 1
                      // ids (the one more is for advance)
    size_t reused;    // how many of the prompt's tokens were there already
    struct {          // Part II only: see advance
        int n, row;   // drafted tokens in the last forward pass; the row whose logits are in use
        int credit;   // what drafts may still cost
    } draft;
};

// Runs a prompt of 1 .. seq_len tokens through the model, except for the beginning that the cache
// holds already; its last token always runs, as that makes the first logits: it is the first row of
// x then. Returns false after Ctrl-C.
static bool prefill(Engine *e, const Ids *prompt) {
    Ids *cached = &e->answer.text.ids;
    size_t same = 0;
    while (same < cached->n && same + 1 < prompt->n && cached->p[same] == prompt->p[same]) same++;
    e->reused = cached->n = same;
    // All ids are copied at once, but they count as cached only when their batch has run.
    memcpy(cached->p, prompt->p, prompt->n * sizeof(int));
    progress_start(&e->model, prompt->n - same);
    bool running = true;
    while (running && cached->n < prompt->n) {
        const int n = min_int(e->model.state.batch, (int)(prompt->n - cached->n));
        const bool last = cached->n + n == prompt->n;
        running = forward_text(&e->model, &e->answer.text, prompt->p + cached->n, n,
                               (int)cached->n, last);
        if (running) cached->n += n;
    }
    progress_end();
    return running;
}

static bool is_stop(const Tokenizer *tok, int id) {
    for (size_t i = 0; i < tok->stop.n; i++) {
        if (tok->stop.p[i] == id) return true;
    }
    return false;
}

// The prompt is there, the answer begins.
static void answer_start(Answer *a, const Tokenizer *tok) {
    memset(a->sampler.answered, 0, tok->vocab_size * sizeof(bool));
    memset(a->sampler.seen, 0, tok->vocab_size * sizeof(bool));
    for (size_t i = 0; i < a->text.ids.n; i++) a->sampler.seen[a->text.ids.p[i]] = true;
    a->drawn->n = 0;
}

// Adds a drawn token to an answer and writes it. Says whether this is the answer's end.
static Ending answer_add(const Engine *e, Answer *a, int id) {
    if (is_stop(&e->tokenizer, id)) return TURN_ENDED;
    ids_add(a->drawn, id);
    a->sampler.answered[id] = a->sampler.seen[id] = true;
    if (!writer_token(a->writer, &e->tokenizer, id)) return TURN_ENDED;
    if (a->drawn->n == (size_t)e->max_new) return LIMIT_REACHED;  // -1 is never equal
    const bool room = a->text.ids.n < (size_t)e->model.state.seq_len;  // to run it
    return room ? GOES_ON : CONTEXT_ENDED;
}

// Writes the continuation of a prompt that the cache holds; `drawn` gets its tokens.
static Ending generate(Engine *e, Ids *drawn) {
    Answer *a = &e->answer;
    a->drawn = drawn;
    answer_start(a, &e->tokenizer);
    advance_start(e);
    if (e->max_new == 0) return LIMIT_REACHED;
    float *logits = classify(&e->model, 0, 1);
    while (logits && !interrupted) {
        const int id = sample(&a->sampler, logits, e->tokenizer.vocab_size);
        if (id < 0) die(NOT_FINITE);
        const Ending ending = answer_add(e, a, id);
        if (ending != GOES_ON) return ending;
        logits = advance(e, id);
    }
    return INTERRUPTED;
}

// ================================================================================================
// PART II. THE PROGRAM
// ================================================================================================

#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <stdarg.h>
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
static int file_open(const char *path);               // a descriptor to read, or -1; -: stdin
static double file_size(int fd);                      // of a regular file, else 0
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
static Text whole_cache(const State *s);  // a text that may use all of the KV cache
static void cache_copy(const Model *m, int to, int from);  // a block: all keys and values
static int draft_rows(void);              // how many tokens run in about the time of one

// parallel(job, arg, count, chunk) cuts 0 .. count - 1 into ranges that begin at multiples of
// `chunk`, and calls job(arg, begin, end) for each, on all threads. It returns when all are done.
// Only the main thread calls it, never inside a job.
typedef void (*Job)(void *arg, int begin, int end);
static void parallel(Job job, void *arg, int count, int chunk);

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

// Returns memory for `count` zeroed elements, aligned to 64 bytes. It is never freed. Pages that
// are never touched take no memory.
static void *alloc(size_t count, size_t size, const char *what) {
    char *p = count < (SIZE_MAX - 64) / size ? calloc(count * size + 64, 1) : NULL;
    if (!p) die("memory: not enough for %s, expected %.0f MB", what, count * (double)size / 1e6);
    return p + (-(uintptr_t)p & 63);
}

// Returns p, reallocated if it has no room for `more` elements of `size` bytes after the first n.
static void *grow(void *p, size_t *cap, size_t n, size_t more, size_t size) {
    if (n + more <= *cap) return p;
    *cap = n + more > 2 * *cap ? n + more : 2 * *cap;
    p = realloc(p, *cap * size);
    if (!p) die("memory: not enough for text, expected %.0f MB", *cap * (double)size / 1e6);
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
INLINE size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

INLINE float as_float(uint32_t bits) {  // the float with these bits
    return (union { uint32_t bits; float value; }){bits}.value;
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
    bool or_zero;      // numbers may also be 0
} Cursor;

#define die_bad(in, name, expected, ...) \
    die("%s: bad %s, expected " expected, (in)->file, name, __VA_ARGS__)

static const void *take(Cursor *in, uint64_t size) {
    if (size > in->rest.n)
        die("%s: ends inside %s, expected %llu more bytes, found %zu; copy or export it again",
            in->file, in->part, (unsigned long long)size, in->rest.n);
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
    if (low == high)
        die_bad(in, name, "%s%.0f, found %.0f; copy or export it again", zero, low, value);
    die_bad(in, name, "%s%.*g to %.*g, found %.*g; copy or export it again", zero, digits, low,
            digits, high, digits, value);
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
    in->part = "the header";
    check_magic(in->file, take_u32(in));
    take_number(in, "version", false, 1, 1);
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
    Cursor in = {path, NULL, file, false};
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
// Merging the tokens of a piece

// A token of a piece while it merges, known by where its bytes begin. The array of a piece's n
// symbols also holds a tree that says which of them merges next: leaf n + i is a number, the larger
// the earlier symbol i merges with the next one, or 0 if they make no token; node i < n is the
// larger of nodes 2 i and 2 i + 1. So node 1 is the largest of all.
struct Symbol {
    uint32_t prev, next;  // where its neighbours begin; next is n at the end, or once prev took it
    uint64_t node;
};

// Finds what the symbol at `begin` makes with the next one, and updates the tree above it.
static void enter(Encoder *enc, Bytes piece, uint32_t begin) {
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
    for (uint32_t i = 0; i < n && !interrupted; i++) enter(enc, piece, i);
    while (s[1].node && !interrupted) {
        const uint32_t i = n - (uint32_t)s[1].node, merged = s[i].next, next = s[merged].next;
        s[i].next = next;
        s[merged].next = n;
        if (next < n) s[next].prev = i;
        if (i > 0) enter(enc, piece, s[i].prev);
        enter(enc, piece, i);
        enter(enc, piece, merged);
    }
    for (uint32_t i = 0; i < n; i = s[i].next) {
        ids_add(enc->out, token_find(enc->tok, (Bytes){piece.p + i, s[i].next - i}, false));
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
// length of the rest, then sections, each at most once: a tag of 4 bytes, u32 length, payload (see
// the table of sections). The Unicode data is that of HF's tokenizers package, so that ids agree on
// every text.

static const float ADDED_SCORE = -1e6f;  // tokens that come out of merges have a higher score
enum { LONGEST_ADDED = 128 };            // bytes: added_next tries all lengths

static Bytes take_text(Cursor *in) {
    const uint32_t n = take_u32(in);
    return (Bytes){take(in, n), n};
}

static uint32_t take_int(Cursor *in, uint32_t low, uint32_t high) {
    return (uint32_t)take_number(in, in->part, false, low, high);
}

static void take_ids(Cursor *in, const Tokenizer *tok, Ids *ids) {
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

// Tables of characters: BAD_BYTE + byte stands for a byte that is not UTF-8.
enum { LAST_CHAR = 0x10FFFF, BAD_BYTE, N_CHARS = BAD_BYTE + 256 };
// Tokenizer.chars: a class; more than that if NFC may change the character or the one before
enum { CLASS_MASK = 3, NFC_ACTIVE = 4, CCC_SHIFT = 8 };

// Ranges of characters, ascending: u32 first, u32 last, u32 value, 1 .. highest
static void take_ranges(Cursor *in, Tokenizer *tok, uint32_t highest, int shift) {
    for (uint32_t next = 0; in->rest.n;) {
        const uint32_t first = take_int(in, next, LAST_CHAR);
        const uint32_t last = take_int(in, first, LAST_CHAR), value = take_int(in, 1, highest);
        for (next = first; next <= last; next++) tok->chars[next] |= value << shift;
    }
}

// c decomposes into `first` and `second`; if `second` is 0, c is just another code for `first`. If
// the pair composes again, NFC leaves c alone, and only a text with `second` needs work; otherwise
// every c must be replaced.
static void add_decomposition(Tokenizer *tok, uint32_t c, uint32_t first, uint32_t second,
                              bool composes) {
    const uint64_t parts = (uint64_t)first << 32 | second;
    tok->decomposed[c] = parts;
    if (composes) tok->composed[tok->n_composed++] = (Mapping){parts, c};
    tok->chars[composes ? second : c] |= NFC_ACTIVE;
}

static int compare_u64(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// deco: canonical decompositions, u32 character, u32 first, u32 second or 0, u32 composes, by
// character. Those of Hangul syllables (a lead, a vowel and perhaps a tail) are not there: they
// follow from their numbers (Unicode Standard, section 3.12).
static void take_decompositions(Cursor *in, Tokenizer *tok) {
    enum { FIRST_SYLLABLE = 0xAC00, SYLLABLES = 19 * 21 * 28 };
    if (in->rest.n == 0) return;
    tok->decomposed = alloc(N_CHARS, sizeof(uint64_t), "the tokenizer");
    tok->composed = alloc(in->rest.n / 16 + SYLLABLES, sizeof(Mapping), "the tokenizer");
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
    qsort(tok->composed, tok->n_composed, sizeof(Mapping), compare_u64);
}

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
}

static const struct { char tag[5]; void (*take)(Cursor *in, Tokenizer *tok); } sections[] = {
    {"adde", take_added}, {"clas", take_classes}, {"ccc ", take_ccc}, {"deco", take_decompositions},
    {"head", take_head}, {"tail", take_tail}, {"stop", take_stop}, {"samp", take_sampling},
    {"repe", take_penalty}, {"mode", take_mode}, {"chat", take_chat}};

static void take_extension(Cursor *in, Tokenizer *tok) {
    enum { N = sizeof(sections) / sizeof(*sections) };
    in->part = "the extension";
    if (memcmp(take(in, 4), "q3tx", 4) != 0)
        die("%s: wrong bytes after token %d, expected q3tx or the end; is it another model's?",
            in->file, tok->vocab_size - 1);
    take_number(in, "extension version", false, 1, 1);
    take_number(in, "extension length", false, in->rest.n - 4.0, in->rest.n - 4.0);
    for (bool seen[N] = {false}; in->rest.n;) {
        const char *tag = take(in, 4);
        int i = 0;
        while (i < N && memcmp(tag, sections[i].tag, 4) != 0) i++;
        if (i == N)
            die("%s: unknown section \"%.4s\"; was it made by a newer export.py?", in->file, tag);
        if (seen[i]) die("%s: section %s is there twice", in->file, sections[i].tag);
        seen[i] = true;
        Cursor section = {in->file, sections[i].tag, take_text(in), false};
        sections[i].take(&section, tok);
        if (section.rest.n)
            die("%s: section %s has %zu bytes too many", in->file, section.part, section.rest.n);
    }
}

// The slot of the hash table that holds the token with these bytes, or is free for it: an added and
// an ordinary one may have the same bytes. FNV-1a with a secret factor; the slot comes from both
// halves of a last product (as in wyhash).
static uint32_t *token_slot(const Tokenizer *tok, Bytes text, bool added) {
    uint64_t hash = tok->secret;
    for (size_t i = 0; i < text.n; i++) hash = (hash ^ text.p[i]) * tok->secret;
    __uint128_t folded = (__uint128_t)hash * tok->secret;
    uint32_t slot = (uint32_t)(folded ^ folded >> 64) & tok->mask;
    for (; tok->table[slot]; slot = (slot + 1) & tok->mask) {
        const uint32_t id = tok->table[slot] - 1;
        if (bytes_equal(tok->text[id], text) && !(tok->kind[id] & ADDED) == !added) break;
    }
    return &tok->table[slot];
}

static int token_find(const Tokenizer *tok, Bytes text, bool added) {
    return (int)*token_slot(tok, text, added) - 1;
}

static void index_tokens(Tokenizer *tok, const char *file) {
    tok->secret = (uint64_t)(now() * 1e9) * 0x9E3779B97F4A7C15u | 1;  // new in each run
    tok->mask = UINT32_MAX >> __builtin_clz(2 * (uint32_t)tok->vocab_size | 255);
    tok->table = alloc((size_t)tok->mask + 1, sizeof(*tok->table), "the tokenizer");
    for (int id = 0; id < tok->vocab_size; id++) {
        const Bytes s = tok->text[id];
        const bool added = tok->kind[id] & ADDED;
        uint32_t *slot = token_slot(tok, s, added);
        if (*slot == 0 && (added || s.n == 1 || tok->score[id] > ADDED_SCORE)) *slot = id + 1;
        if (added) tok->added_start[s.p[0]] = true;
        if (added && s.n > tok->longest_added) tok->longest_added = s.n;
    }
    for (int i = 0; i < 256; i++) {
        if (token_find(tok, (Bytes){(uint8_t[]){i}, 1}, false) < 0)
            die("%s: no token for byte 0x%02x, expected all 256; is it another model's?", file, i);
    }
}

static void tokenizer_load(Tokenizer *tok, const char *file, int vocab_size) {
    Cursor in = {file, "the header", file_map(file), false};
    *tok = (Tokenizer){.vocab_size = vocab_size, .temperature = 0.6f, .top_p = 0.95f, .top_k = 20,
                       .repetition = 1};
    tok->text = alloc(vocab_size, sizeof(Bytes), "the tokenizer");
    tok->score = alloc(vocab_size, sizeof(float), "the tokenizer");
    tok->kind = alloc(vocab_size, 1, "the tokenizer");
    tok->chars = alloc(N_CHARS, sizeof(uint16_t), "the tokenizer");
    take_u32(&in);  // max_token_length
    const int bos = take_number(&in, "bos id", false, 0, vocab_size - 1);
    const int eos = take_number(&in, "eos id", false, 0, vocab_size - 1);
    in.part = "the tokens";
    for (int id = 0; id < vocab_size && in.rest.n; id++) {
        tok->score[id] = as_float(take_u32(&in));
        if (isnan(tok->score[id])) die("%s: bad score of token %d, expected a number", file, id);
        const Bytes s = tok->text[id] = take_text(&in);
        if (s.n > tok->longest) tok->longest = s.n;
        if (tok->score[id] > ADDED_SCORE || s.n < 2 || s.n > LONGEST_ADDED) continue;
        const bool special = s.n > 4 && !memcmp(s.p, "<|", 2) && !memcmp(s.p + s.n - 2, "|>", 2);
        tok->kind[id] = special ? ADDED | SPECIAL : ADDED;  // unless the file says which are
    }
    if (in.rest.n) take_extension(&in, tok);
    tok->has_classes = tok->chars['a'] & CLASS_MASK;  // else something like them follows
    for (uint32_t c = 0; c < BAD_BYTE && !tok->has_classes; c++) {
        const bool letter = c >= 128 || isalpha(c);
        tok->chars[c] |= letter ? LETTER : isspace(c) ? SPACE : isdigit(c) ? NUMBER : OTHER;
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
    return (Char){c.c, c.n, tok->chars[c.c] & CLASS_MASK, tok->chars[c.c] > CLASS_MASK};
}

// Appends c as UTF-8; a BAD_BYTE as its byte.
static void add_char(Buffer *b, uint32_t c) {
    int n = c < 0x80 || c >= BAD_BYTE ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    uint8_t u[4] = {c >= BAD_BYTE ? c - BAD_BYTE : c};
    for (int i = n - 1; i > 0; i--, c >>= 6) u[i] = 0x80 | (c & 0x3F);
    if (n > 1) u[0] = 0xF0 << (4 - n) | c;
    buffer_add(b, (Bytes){u, n});
}

// Characters to be put in order: combining class (ccc) << 56 | place << 24 | code point
typedef struct {
    uint64_t *p;
    size_t n, cap;
} Marks;

enum { CODE_POINT = 0xFFFFFF };

// Appends the full canonical decomposition of c. Unicode needs at most 4 levels, but an untrusted
// file could recurse without end.
static void decompose(const Tokenizer *tok, Marks *out, uint32_t c, int steps) {
    const uint64_t parts = tok->decomposed[c], ccc = tok->chars[c] >> CCC_SHIFT;
    if (steps > 8)
        die("tokenizer: bad section deco, expected at most 8 levels, found more at U+%04X", c);
    if (parts) {
        decompose(tok, out, parts >> 32, steps + 1);
        if ((uint32_t)parts) decompose(tok, out, (uint32_t)parts, steps + 1);
    } else {
        out->p = grow(out->p, &out->cap, out->n, 1, sizeof(uint64_t));
        out->p[out->n] = ccc << 56 | (uint64_t)out->n << 24 | c;
        out->n++;
    }
}

// Sorts each run of marks (ccc > 0) by ccc, stably. Then each character composes with the last
// starter (ccc 0) before it, unless a character between the two has the same ccc or a higher one.
static void order_and_compose(const Tokenizer *tok, Marks *marks) {
    for (size_t i = 0, stop; i < marks->n; i = stop + 1) {
        for (stop = i; stop < marks->n && marks->p[stop] >> 56; stop++) {}
        qsort(marks->p + i, stop - i, sizeof(uint64_t), compare_u64);
    }
    uint64_t none = CODE_POINT, *starter = &none, *out = marks->p;  // no pair begins with `none`
    uint64_t last = 0;  // ccc of the character before, 0 if that is the starter
    for (size_t i = 0; i < marks->n; i++) {
        const uint64_t mark = marks->p[i], ccc = mark >> 56;
        const uint64_t pair = (*starter & CODE_POINT) << 32 | (mark & CODE_POINT);
        const Mapping *composed = last && last >= ccc ? NULL
            : bsearch(&pair, tok->composed, tok->n_composed, sizeof(Mapping), compare_u64);
        if (composed) {
            *starter = composed->to;
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
    for (size_t at = 0, run, end = 0; at < text.n && !interrupted; at = end) {
        for (run = at; (c = char_at(tok, text, end)).n && !c.active; end += c.n) run = end;
        buffer_add(out, (Bytes){text.p + at, run - at});
        chars.n = 0;
        for (end = run; (c = char_at(tok, text, end)).n && (end == run || c.active); end += c.n) {
            decompose(tok, &chars, c.c, 0);
        }
        order_and_compose(tok, &chars);
        for (size_t i = 0; i < chars.n; i++) add_char(out, chars.p[i] & CODE_POINT);
    }
    free(chars.p);
}

// ------------------------------------------------------------------------------------------------
// Drafts for advance(): prompt lookup decoding (Saxena 2023). An answer often repeats what the
// context holds: code that it changes, text that it quotes. Where the last NGRAM tokens occurred
// before, the tokens that followed there are a draft of what comes next. Random numbers are drawn
// only for rows that are used. So drafts change the time and nothing else: the text is the same,
// not just its distribution as in speculative decoding (Leviathan et al., arXiv 2211.17192).
//
// A pass has draft_rows() tokens, twice as many after a draft that was right to its end, and 1 with
// -b 1. A drafted token costs DRAFT_COST, a right one earns twice as much, every pass earns 1, and
// while this credit is negative there are no drafts: wrong ones take at most 2 % of the time, also
// with experts, where a drafted token takes half the time of another.
enum { NGRAM = 5, DRAFT_COST = 20, MOST_CREDIT = 40 * DRAFT_COST };

static void advance_start(Engine *e) { e->draft.n = e->draft.row = 0; }

// Drafts what may follow the text and its next token, from the latest place where it fits, as far
// as the cache and the logits have room. A draft that runs into itself repeats itself.
static void draft(Engine *e) {
    const State *s = &e->model.state;
    const size_t n = e->answer.text.ids.n + 1;
    int *ids = e->answer.text.ids.p;
    const bool was_right = e->draft.n && e->draft.row == e->draft.n;
    const int room = min_int(s->logit_rows, s->seq_len - (int)n + 1);
    const int rows = min_int(was_right ? 2 * draft_rows() : draft_rows(), room);
    advance_start(e);
    e->draft.credit = min_int(e->draft.credit + 1, MOST_CREDIT);
    if (rows == 1 || e->draft.credit < 0) return;
    size_t from = n - 1, size = NGRAM * sizeof(int);
    while (from >= NGRAM && memcmp(ids + from - NGRAM, ids + n - NGRAM, size) != 0) from--;
    if (from < NGRAM) return;
    e->draft.n = rows - 1;
    e->draft.credit -= DRAFT_COST * e->draft.n;
    for (int i = 0; i < e->draft.n; i++) ids[n + i] = ids[from + i];
}

// Runs the last token and its draft. A wrong draft may overflow, and its V, though nobody looks at
// it, then spoils the rows before it (0 * infinity is no number): so the token runs again, alone.
static bool run_draft(Engine *e) {
    Model *m = &e->model;
    Text *text = &e->answer.text;
    const int n = 1 + e->draft.n, pos = (int)text->ids.n;
    if (!forward_text(m, text, text->ids.p + pos, n, pos, n)) return false;
    const float *logits = classify(m, 0, n);
    if (n == 1 || isfinite(sum_double(logits, n * m->config.vocab_size))) return true;
    e->draft.n = 0;
    return run_draft(e);
}

static float *advance(Engine *e, int id) {
    const Model *m = &e->model;
    Ids *cached = &e->answer.text.ids;
    int *next = &cached->p[cached->n];
    if (e->draft.row < e->draft.n && *next == id) {  // it has run already
        e->draft.credit += 2 * DRAFT_COST;
        e->draft.row++;
    } else {
        *next = id;
        draft(e);
        if (!run_draft(e)) return NULL;
    }
    cached->n++;
    return m->state.logits + (size_t)e->draft.row * m->config.vocab_size;
}

// ------------------------------------------------------------------------------------------------
// Writing: progress, messages, an answer as it comes. No file and no model drives the terminal: see
// add_printable. In chat, thinking is dimmed on a terminal; elsewhere it goes to stderr, so that
// stdout holds just the answer.

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
    size_t tokens, layers, done;  // to run; of the model; tokens times layers that ran
    double start, drawn;          // when it began; when a line was last drawn
    bool shown;                   // the line is there
} progress;

static void progress_start(const Model *m, size_t tokens) {
    progress = (struct Progress){.tokens = tokens, .layers = m->config.n_layers, .start = now()};
}

// Clears the line, before an answer, a notice or an error begins.
static void progress_end(void) {
    if (progress.shown) fputs("\r\033[K", stderr);
    progress.shown = false;
    progress.tokens = 0;
}

// Shows that `done` of all are done, after so many tokens since `start`. all: 0 if nobody knows; an
// estimate is no whole number. The time left is that at the rate so far. A prompt's is longer, as
// attention reads more and more.
static void progress_show(double start, double done, double all, const char *what, double tokens) {
    const double time = now(), seconds = time - start, rate = tokens / seconds;
    if (quiet || seconds < 2 || time < progress.drawn + 0.1 || !is_terminal(STDERR_FILENO)) return;
    progress.drawn = time;
    progress.shown = true;
    fprintf(stderr, "\r%.0f", done);
    if (all > 0) fprintf(stderr, " of %s%.0f", all > floor(all) ? "about " : "", all);
    fprintf(stderr, " %s, %.*f tokens/s", what, rate < 999.95, rate);
    if (all > 0 && done > 0) fprintf(stderr, ", %.0f s left", seconds * (all / done - 1));
    fputs("\033[K", stderr);
}

static void progress_add(int n) {
    if (progress.tokens == 0) return;
    progress.done += n;
    const size_t done = progress.done / progress.layers;
    progress_show(progress.start, done, progress.tokens, "tokens", done);
}

static void report(const char *fmt, ...) {
    enum { HALF = 500 };  // a longer message loses its middle: what is wrong stands at an end
    static char text[1 << 18];
    uint8_t line[6 * HALF + 16];
    Buffer shown = {line, 0, sizeof(line)};  // it has room enough: memory may have run out
    va_list args;
    va_start(args, fmt);
    const size_t n = min_size(vsnprintf(text, sizeof(text), fmt, args), sizeof(text) - 1);
    va_end(args);
    const bool cut = n > 2 * HALF;
    add_printable(&shown, (Bytes){(uint8_t *)text, cut ? HALF : n}, false);
    if (cut) buffer_add(&shown, bytes(" ... "));
    if (cut) add_printable(&shown, bytes(text + n - HALF), false);
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
    bool between;   // it has thought, and only newlines, which just a terminal shows, came since
    Buffer *to;     // of a list: the answer goes there, its thinking nowhere; NULL: to stdout
    Bytes stop;     // -x: the answer ends before this text
    size_t cut;     // bytes that were drawn, but are not written because of it
    Buffer held;    // text that is not written yet
    Buffer shown;   // as it goes to a terminal
};

// How many bytes at the end must wait for what follows: an unfinished UTF-8 character; if
// it goes through add_printable also a carriage return, which is kept only before a newline
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
    Buffer *shown = &out->shown;
    if (text.n == 0) return;
    shown->n = 0;
    if (dim) buffer_add(shown, bytes("\033[2m"));
    if (out->terminal || (out->thinking && !out->to)) add_printable(shown, text, true);
    if (dim) buffer_add(shown, bytes("\033[0m"));
    if (out->terminal) write_stdout(bytes_of(shown));
    else if (out->thinking && !out->to && !quiet) fwrite(shown->p, 1, shown->n, stderr);
    else if (!out->thinking && out->to) buffer_add(out->to, text);
    else if (!out->thinking) write_stdout(text);
    buffer_cut(&out->held, text.n);
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
// Conversation: a prompt and its answer, turns that fit into the context, messages from a terminal

static const char *const mode_names[] = {"chat", "generate", "tokenize", "perplexity", "embed"};

typedef struct {  // as given on the command line
    const char *model, *text, *file, *system, *stop;  // NULL: not given
    const char *list, *json_list;                     // -l and -L
    int mode, think, top_k, context, threads;         // -1: not given
    float temperature, top_p, repetition;             // -1: not given
    float presence;
    int n, batch;                                     // n: -1 is no limit
    unsigned long long seed;
    bool seeded, verbose;                             // -s, -v
} Options;

static bool is_list(const Options *o) { return o->list || o->json_list; }

typedef struct {
    Options options;
    Engine engine;
    Writer writer;
    Mode mode;        // -m, or what the model is made for
    bool noticed;     // the notices have been given
    bool dialogue;    // a conversation at a terminal, which goes on after an error
    Conversation conversation;
    Buffer input;     // the prompt's text, or the message being typed
    Ids prompt;
} App;

// Can the model's thinking be switched on and off?
static bool can_switch(const Tokenizer *tok) {
    return !bytes_equal(tok->chat.answer[0], tok->chat.answer[1]);
}

static bool switched_on(const App *app) {  // by -r 1
    return app->options.think == 1 && can_switch(&app->engine.tokenizer);
}

// Does the prompt itself open the thinking?
static bool begins_thinking(const App *app) {
    Bytes answer = app->engine.tokenizer.chat.answer[switched_on(app)];
    return find_last(answer, bytes("<think>")) > find_last(answer, bytes("</think>"));
}

// Prepares an answer, which goes to stdout, or in a list into `to`. Where the options do
// not say how tokens are drawn, it is as the checkpoint asks for; but with thinking switched
// off as Qwen advises, unless the checkpoint asks for greedy answers.
static void prepare_answer(const App *app, Answer *a, Writer *writer, Buffer *to) {
    const Options *o = &app->options;
    const Tokenizer *tok = &app->engine.tokenizer;
    const bool advised = app->mode == CHAT && can_switch(tok) && !switched_on(app) &&
                         tok->temperature != 0;
    a->sampler = (Sampler){
        .temperature = o->temperature >= 0 ? o->temperature : advised ? 0.7f : tok->temperature,
        .top_p = o->top_p >= 0 ? o->top_p : advised ? 0.8f : tok->top_p,
        .top_k = o->top_k >= 0 ? o->top_k : advised ? 20 : tok->top_k,
        .presence = o->presence,
        .repetition = o->repetition >= 0 ? o->repetition : tok->repetition,
        .rng = o->seed,
        .answered = alloc(tok->vocab_size, sizeof(bool), "the sampler"),
        .seen = alloc(tok->vocab_size, sizeof(bool), "the sampler"),
    };
    *writer = (Writer){.chat = app->mode == CHAT, .terminal = !to && is_terminal(STDOUT_FILENO),
                       .to = to, .stop = bytes(o->stop ? o->stop : "")};
    a->writer = writer;
}

// What stderr says before the model runs: the prompt's ids, and the first time the notices, which
// wait until the last check has passed, so that an error message stands alone.
static void give_notices(App *app) {
    const Options *o = &app->options;
    const Tokenizer *tok = &app->engine.tokenizer;
    const size_t context = app->engine.model.state.seq_len;
    const bool chat = app->mode == CHAT, thinks = switched_on(app) || begins_thinking(app);
    const bool reads_stdin = o->file ? !strcmp(o->file, "-") : !o->text || is_list(o);
    if (o->verbose && app->mode != TOKENIZE && app->prompt.n) {
        fputs("prompt ids:", stderr);
        for (size_t i = 0; i < app->prompt.n; i++) fprintf(stderr, " %d", app->prompt.p[i]);
        fputc('\n', stderr);
    }
    if (app->noticed) return;
    app->noticed = true;
    if (!tok->has_classes)
        notice("tokenizer: no Unicode data, exact on ASCII only; export the model again");
    if (o->mode < 0 && !chat)
        notice("mode: %s, as this is no chat model; -m chat overrides it", mode_names[app->mode]);
    if (chat && o->think >= 0 && !can_switch(tok))
        notice("-r: no effect, this model's thinking can't be switched");
    if (!chat && o->system) notice("-y: no effect, only -m chat has a system prompt");
    if (!chat && o->think >= 0) notice("-r: no effect, only -m chat thinks");
    if (app->mode > GENERATE && o->stop) notice("-x: no effect, only an answer can end early");
    if (app->mode == PERPLEXITY && app->prompt.n > context)
        notice("text: %zu tokens are scored in pieces of %zu (-c)", app->prompt.n, context);
    if (chat && thinks && app->engine.answer.sampler.temperature == 0)
        notice("-t 0: greedy thinking tends to repeat without end, Qwen advises 0.6");
    if (!reads_stdin && stdin_has_data())
        notice("stdin: has data that was not read; -f - would add all of it");
}

// Can a text of so many tokens run? If it can't, that is said, and ends the program, unless this is
// a list or a dialogue. A perplexity is scored in pieces.
static bool check_length(const App *app, const char *where, size_t tokens) {
    const bool scores = app->mode == PERPLEXITY;
    const size_t least = scores ? 2 : 1, most = scores ? INT_MAX : app->engine.model.state.seq_len;
    if (app->mode == TOKENIZE || (tokens >= least && tokens <= most)) return true;
    if (tokens < least)
        report("%s: %s, expected %zu or more tokens, found %zu", where,
               tokens ? "too short" : "empty", least, tokens);
    else
        report("%s: too long, expected at most %zu tokens (-c, up to %d), found %zu", where, most,
               app->engine.model.config.max_seq_len, tokens);
    if (!app->dialogue && !is_list(&app->options)) exit(EXIT_FAILURE);
    return false;
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

// Runs the prompt and writes its answer, the conversation's next message; then notices and
// statistics. If -x ended the answer, the tokens of which nothing was written are taken back, and
// the beginning of one that was written in part becomes the message's text. False: Ctrl-C came
// before the first token.
static bool respond(App *app) {
    Message *message = conversation_add(&app->conversation, ASSISTANT, (Bytes){0});
    Ids *answer = &message->ids;
    Engine *e = &app->engine;
    const Tokenizer *tok = &e->tokenizer;
    const double start = now();
    const bool ran = prefill(e, &app->prompt);
    const double middle = now();
    const size_t done = e->answer.text.ids.n;  // after Ctrl-C not the whole prompt
    const double p = (done - e->reused) / (middle - start + 1e-9);
    const Ending ending = ran ? generate(e, answer) : INTERRUPTED;
    const double a = answer->n / (now() - middle + 1e-9);
    const char *where = app->writer.thinking ? " inside its thinking" : "";
    writer_end(&app->writer);
    if (ending == LIMIT_REACHED) notice("answer: ended%s by -n after %zu tokens", where, answer->n);
    if (ending == CONTEXT_ENDED)
        notice("answer: ended%s by a full context of %d tokens (-c)", where,
               e->model.state.seq_len);
    if (!quiet)
        fprintf(stderr,  // rates with a decimal only below 1,000
                "prompt %zu tokens at %.*f/s (%zu cached), answer %zu at %.*f/s, seed %llu\n",
                done, p < 999.95, p, e->reused, answer->n, a < 999.95, a, app->options.seed);
    for (size_t lost, *cut = &app->writer.cut; *cut > 0; *cut -= lost) {
        const int id = answer->p[--answer->n];
        const Bytes text = tok->kind[id] & SPECIAL ? (Bytes){0} : tok->text[id];
        lost = min_size(*cut, text.n);
        buffer_add(&message->text, (Bytes){text.p, text.n - lost});
    }
    return ending != INTERRUPTED || answer->n > 0;
}

// Answers the conversation's last message; with `again` the one before, whose new answer takes the
// old one's place. If the prompt leaves no room for an answer, the older half of the turns is
// forgotten, again until there is room or only the question is left; if even that is too long, no
// turn is. False: there is no answer, for that reason or as Ctrl-C came first.
static bool answer_last(App *app, bool again) {
    Conversation *talk = &app->conversation;
    const Conversation asked = {talk->p, talk->n - again, 0};  // up to the question
    const size_t context = app->engine.model.state.seq_len, system = app->options.system != NULL;
    const size_t room = min_size(context / 4, (size_t)app->options.n);  // of -1: the largest number
    size_t first = system;
    for (;; first += (asked.n - first + 1) / 4 * 2) {  // two messages a turn; the last has one
        render(&app->engine.tokenizer, &asked, first, switched_on(app), &app->prompt);
        if (app->prompt.n + room <= context || first == asked.n - 1 || interrupted) break;
    }
    if (interrupted || !check_length(app, "prompt", app->prompt.n)) return false;
    if (first > system)
        notice("context: no room in %zu tokens (-c), forgotten turns: %zu", context,
               (first - system) / 2);
    conversation_drop(talk, system, first);
    give_notices(app);
    writer_thinks(&app->writer, begins_thinking(app));
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

typedef struct {   // of a file
    int fd;
    const char *name;
    Buffer data;   // bytes that were read
    size_t end;    // of the last line
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
        const ssize_t got = interrupted ? -1 : read_more(in->fd, data);
        if (got < 0 && !interrupted) die("%s: %s", in->name, strerror(errno));
        if (got < 0) return false;
        if (got == 0) break;
    }
    const size_t start = in->end;
    in->end = newline ? (size_t)(newline - data->p) + 1 : data->n;
    *line = (Bytes){data->p + start, in->end - start};
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
// arrive together are a paste, which waits for Enter: at the end of its last line, or, if that line
// had a newline already, on the empty line after it. A backslash at the end of a line whose
// newline was typed joins the next one to it. False: the end of input, or Ctrl-C.
static bool read_message(App *app) {
    Buffer *message = &app->input;
    bool cut = false;
    message->n = 0;
    fputs("> ", stderr);
    for (Waiting before, after = NOTHING;;) {
        const ssize_t got = interrupted ? -1 : read_more(STDIN_FILENO, message);
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

// Of what was typed, text is "PATH TEXT": sends TEXT, an empty line and the file's text. A PATH may
// begin with ~/, which is $HOME.
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
    if (error) report("/file: %s%s%s", path, *path ? ": " : "", error);
    else chat_turn(app, chop(bytes_of(message)));
}

static bool is(Bytes text, const char *word) { return bytes_equal(text, bytes(word)); }

// Sends what was typed, or runs it if it is a command: a line, not in quotes; only /file may have
// something after it. Of lines that are just a slash and letters, only /think is a message. (The
// model's other switch, /no_think, is not letters alone.) False: it ends the program.
static bool run_message(App *app) {
    Conversation *talk = &app->conversation;
    const Bytes text = bytes_of(&app->input);
    Bytes rest = text, word = take_word(&rest);
    size_t letters = 1;
    const bool command = word.p == text.p && !memchr(text.p, '\n', text.n);
    if (!command || (rest.n && !is(word, "/file"))) word.n = 0;
    while (letters < word.n && isalpha(word.p[letters])) letters++;
    if (memchr(text.p, '\033', text.n)) {
        report("input: escape characters, nothing was sent; rlwrap makes arrow keys work");
    } else if (is(word, "/file")) {
        send_file(app, rest);
    } else if (is(word, "/help")) {
        fputs(commands, stderr);
    } else if (is(word, "/retry")) {
        const bool greedy = app->engine.answer.sampler.temperature == 0;
        if (talk->n < 2) notice("/retry: there is no answer yet");
        else if (greedy) notice("/retry: -t 0 would draw the same answer again");
        else answer_last(app, true);
    } else if (is(word, "/clear")) {
        conversation_drop(talk, app->options.system != NULL, talk->n);
    } else if (is(word, "/bye") || is(word, "/exit") || is(word, "/quit") || is(word, "exit") ||
               is(word, "quit")) {
        return false;
    } else if (word.n > 1 && *word.p == '/' && letters == word.n && !is(word, "/think")) {
        report("%.*s: no such command, /help shows them", (int)word.n, word.p);
    } else {
        chat_turn(app, text);
    }
    return true;
}

// A conversation at a terminal
static void run_dialogue(App *app) {
    const char *thinking = switched_on(app) ? "on" : begins_thinking(app) ? "always" : "off";
    app->dialogue = true;
    give_notices(app);
    notice("%s: context %d, thinking %s, /help shows the commands", app->options.model,
           app->engine.model.state.seq_len, thinking);
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

// Appends ids, separated by spaces, and a newline.
static void buffer_add_ids(Buffer *b, const Ids *ids) {
    for (size_t i = 0; i < ids->n; i++) buffer_print(b, i ? " %d" : "%d", ids->p[i]);
    buffer_add(b, bytes("\n"));
}

// Appends a text as a JSON string, and a newline. What is not UTF-8 is \ufffd.
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
    buffer_add(b, bytes("\"\n"));
}

// -log of the probability of token id by its logits (n), which are overwritten
static double surprise(float *logits, int n, int id) {
    float max = max_of(logits, n), logit = logits[id];
    likelihoods(logits, n, max, 1);
    return log(sum_double(logits, n)) + max - logit;
}

// Appends a line. The surprises of all tokens but the first are added up one by one: batches do not
// change the last digits. A text longer than the context is scored in pieces, each of which begins
// with the last token of the piece before. False after Ctrl-C, or if the sum is not finite.
static bool buffer_add_perplexity(Buffer *line, Engine *e, const Ids *ids) {
    const State *s = &e->model.state;
    const int n = (int)ids->n - 1, vocab_size = e->tokenizer.vocab_size;
    double sum = 0;
    for (int at = 0, count; at < n; at += count) {
        const int pos = at % (s->seq_len - 1);
        count = min_int(min_int(s->batch, s->seq_len - 1 - pos), n - at);
        if (!forward_text(&e->model, &e->answer.text, ids->p + at, count, pos, count)) return false;
        for (int i = 0; i < count; i++) {
            const int row = i % s->logit_rows;
            if (row == 0) classify(&e->model, i, min_int(s->logit_rows, count - i));
            float *logits = s->logits + (size_t)row * vocab_size;
            sum += surprise(logits, vocab_size, ids->p[at + i + 1]);
        }
    }
    buffer_print(line, "tokens %d nll %.6f ppl %.4f\n", n, sum / n, exp(sum / n));
    return isfinite(sum);
}

// Appends a line: the hidden state (dim) of row i of x after the final norm, L2-normalized, as a
// JSON array. False if it is not finite.
static bool buffer_add_embedding(Buffer *line, const Model *m, int row) {
    const Config *c = &m->config;
    float *h = m->state.h + (size_t)row * c->dim;
    double squares = 0;
    rmsnorm(h, m->state.x + (size_t)row * c->dim, m->weights.rms_final, c->dim, c->rms_norm_eps);
    for (int i = 0; i < c->dim; i++) squares += (double)h[i] * h[i];
    const double length = fmax(sqrt(squares), 1e-12);
    for (int i = 0; i < c->dim; i++) buffer_print(line, "%s%.9g", i ? ", " : "[", h[i] / length);
    buffer_add(line, bytes("]\n"));
    return isfinite(squares);
}

// The prompt of every mode but chat
static void encode_text(const App *app, Bytes text, Ids *ids) {
    encode_raw(&app->engine.tokenizer, text, ids);
    if (app->mode == GENERATE && ids->n == 0) ids_add(ids, app->engine.tokenizer.end_of_text);
}

// Every mode but chat
static void run_raw(App *app, Bytes text) {
    Engine *e = &app->engine;
    const Ids *ids = &app->prompt;
    Buffer lines = {0};
    bool finite = true;
    encode_text(app, text, &app->prompt);
    if (interrupted) return;
    check_length(app, "prompt", ids->n);
    give_notices(app);
    if (app->mode == GENERATE) respond(app);
    if (app->mode == EMBED) finite = prefill(e, ids) && buffer_add_embedding(&lines, &e->model, 0);
    if (app->mode == PERPLEXITY) {
        progress_start(&e->model, ids->n - 1);
        finite = buffer_add_perplexity(&lines, e, ids);
        progress_end();
    }
    if (!finite && !interrupted) die("%s", app->mode == EMBED ? BAD_VECTOR : NOT_FINITE);
    if (app->mode == TOKENIZE && !app->options.verbose) buffer_add_ids(&lines, ids);
    for (size_t i = 0; app->mode == TOKENIZE && app->options.verbose && i < ids->n; i++) {
        buffer_print(&lines, "%d ", ids->p[i]);
        buffer_add_json(&lines, e->tokenizer.text[ids->p[i]]);
    }
    write_stdout(bytes_of(&lines));
    free(lines.p);
}

// ------------------------------------------------------------------------------------------------
// JSON (RFC 8259), as far as a line has it: a string, or messages, which may hold anything else.
// Functions that return bool take what they are named after, if it is next.

typedef struct {
    Bytes rest;            // what has not been read
    const char *expected;  // what was not found there: after an error nothing is taken any more
    Buffer *text;          // the last string
} Json;

static void json_need(Json *j, bool taken, const char *what) {
    if (!taken && !j->expected) j->expected = what;
}

static bool json_take(Json *j, const char *word) {
    const size_t n = strlen(word);
    if (j->expected || j->rest.n < n || memcmp(j->rest.p, word, n) != 0) return false;
    j->rest = bytes_from(j->rest, n);
    return true;
}

static bool json_any(Json *j, const char *set) {  // one or more bytes of a set
    const size_t before = j->rest.n;
    while (!j->expected && j->rest.n && memchr(set, *j->rest.p, strlen(set)))
        j->rest = bytes_from(j->rest, 1);
    return j->rest.n < before;
}

static bool json_token(Json *j, const char *word) {  // perhaps after white space
    json_any(j, " \t\r\n");
    return json_take(j, word);
}

// What the next byte of a string, or an escape, stands for: a character, or half of one (UTF-16)
static int json_char(Json *j) {
    static const char names[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    char s[7] = "";
    memcpy(s, j->rest.p, min_size(j->rest.n, 6));
    const bool escape = s[0] == '\\', plain = !escape && (uint8_t)s[0] >= ' ';
    const bool unit = escape && s[1] == 'u' && strspn(s + 2, "0123456789abcdefABCDEF") == 4;
    const char *name = escape && s[1] ? strchr(names, s[1]) : NULL;
    json_need(j, plain || unit || name, "a string's character, or an escape as in \\n or \\u00e9");
    j->rest = bytes_from(j->rest, unit ? 6 : name ? 2 : plain);
    if (unit) return (int)strtol(s + 2, NULL, 16);
    return name ? meant[name - names] : BAD_BYTE + (uint8_t)s[0];
}

static bool json_string(Json *j) {
    if (!json_token(j, "\"")) return false;
    j->text->n = 0;
    for (int c, before = 0; !j->expected && !json_take(j, "\""); before = c) {
        c = json_char(j);
        if (before >= 0xD800 && before < 0xDC00 && c >= 0xDC00 && c < 0xE000) {
            c += 0x10000 + ((before - 0xD800) << 10) - 0xDC00;
            j->text->n -= 3;  // the first half, which was alone
        }
        add_char(j->text, c >= 0xD800 && c < 0xE000 ? 0xFFFD : c);
    }
    return true;
}

static bool json_number(Json *j) {
    static const char digits[] = "0123456789";
    json_take(j, "-");
    if (!json_take(j, "0") && !json_any(j, digits)) return false;
    if (json_take(j, ".") && !json_any(j, digits)) return false;
    if (!json_take(j, "e") && !json_take(j, "E")) return true;
    if (!json_take(j, "+")) json_take(j, "-");
    return json_any(j, digits);
}

// Goes on to the next value of an array, or of an object, whose key is in j->text then. False: its
// `end` comes first, and is taken.
static bool json_next(Json *j, const char *end, bool first) {
    if (json_token(j, end)) return false;
    json_need(j, first || json_take(j, ","), *end == '}' ? ", or }" : ", or ]");
    json_need(j, *end == ']' || (json_string(j) && json_token(j, ":")), "\"KEY\":");
    return !j->expected;
}

// Takes a value, which must be there, inside of `depth` others. Is it a string?
static bool json_value(Json *j, int depth) {
    if (json_string(j)) return true;
    const char *end = json_take(j, "{") ? "}" : json_take(j, "[") ? "]" : NULL;
    json_need(j, !end || depth < 100, "at most 100 levels");
    for (int i = 0; end && json_next(j, end, i == 0); i++) json_value(j, depth + 1);
    json_need(j, end || json_take(j, "true") || json_take(j, "false") || json_take(j, "null") ||
                 json_number(j), "a value");
    return false;
}

// A message, which `talk` gets; returns its role. Of equal keys the last one counts.
static int json_message(Json *j, Conversation *talk) {
    Message *message = conversation_add(talk, -1, (Bytes){0});
    bool has_content = false;
    json_token(j, "");
    const Bytes start = j->rest;
    json_need(j, json_take(j, "{"), "a message, {\"role\": ..., \"content\": ...}");
    for (int i = 0; json_next(j, "}", i == 0); i++) {
        const bool role = is(bytes_of(j->text), "role"), content = is(bytes_of(j->text), "content");
        const bool text = json_value(j, 2);  // j->text had the key, now it has the value
        const Bytes value = text ? bytes_of(j->text) : (Bytes){0};
        if (role)
            message->role = is(value, "system") ? SYSTEM : is(value, "user") ? USER
                            : is(value, "assistant") ? ASSISTANT : -1;
        if (!content) continue;
        has_content = text;
        message->text.n = 0;
        buffer_add(&message->text, value);
    }
    if (!j->expected && (message->role < 0 || !has_content)) j->rest = start;
    json_need(j, message->role >= 0, "a role: system, user or assistant");
    json_need(j, has_content, "a content that is a string");
    return message->role;
}

// A line: a string, which is in j->text then, or messages, if `talk` is not NULL, which gets them.
// A system message, which only the first one may be, replaces what was there.
static void json_line(Json *j, Conversation *talk) {
    const bool messages = talk && json_token(j, "[");
    int role = messages ? -1 : USER;
    for (int i = 0; messages && json_next(j, "]", i == 0); i++) {
        role = json_message(j, talk);
        json_need(j, role != SYSTEM || i == 0, "a system message only at the start");
        if (role == SYSTEM) conversation_drop(talk, 0, talk->n - 1);
    }
    json_need(j, messages || json_string(j),
              talk ? "a string or an array of messages (-l: plain lines)"
                   : "a string (-l: plain lines)");
    json_need(j, role == USER, "a message of the user as the last one");
    json_token(j, "");
    json_need(j, j->rest.n == 0, "the end of the line");
}

// ------------------------------------------------------------------------------------------------
// Many texts at once: -l and -L. To decode a token, a CPU reads all weights; they serve a token of
// each of 32 texts just as well. So a pass runs the next token of many texts, and texts come and go
// from pass to pass (continuous batching: Orca, OSDI 2022):
//
//   admit    While there are places and blocks, the next texts of the list are encoded and begin.
//   pass     One forward(), with a row of each text at least; the first prompts have as many as
//            fit into -b rows. So a long prompt does not hold up the other texts for long.
//   sample   Each text whose last token has run draws the next one, with its own random numbers.
//   write    A line goes out as soon as it and all lines before it are done.
//
// No row sees another text, and a batch gives the same bits as single tokens. So each answer is the
// one that its text gets alone.
//
// The cache is a pool of blocks, which a text takes as it grows (a paged cache: vLLM, arXiv
// 2309.06180): it holds many texts that could become long, but mostly do not. A text that begins
// like another, say with the same instruction, shares its blocks: each block counts its users. Of
// the first block that is not the same to its end the text gets a copy. A text that does not run,
// as it has ended or waits, keeps its blocks until they or its place are needed: so there is
// something to share even if all answers are one word. When no block is left, the youngest text
// has to wait, and runs again up to the last token that it drew (preemption by recomputation).

enum { PLACES = 32 };                           // texts that run together
enum { AHEAD = 1024, AHEAD_BYTES = 16 << 20 };  // lines that may wait for an earlier one

typedef struct {    // for a text
    size_t number;  // of its line, from 0
    Answer answer;  // its text.ids are the prompt's, then those that were drawn,
    size_t run;     // so many of which have run
    int n_blocks;   // in answer.text.blocks
    size_t cached;  // tokens of its prompt that were there when it began
    Ending ending;  // INTERRUPTED: what the model gave is not finite
    Writer writer;
    Ids drawn;
    Buffer text;    // the answer so far, or a vector
} Place;

typedef struct {
    App *app;
    Lines in;
    bool together;          // passes run several texts, as in all modes but tokenize and perplexity
    bool ended, failed;     // there are no more lines; a line was an error
    size_t read, written;   // lines so far
    Buffer lines[AHEAD];    // line i of the output is at i % AHEAD, empty until it is done
    size_t ahead;           // bytes of these
    // active: first those that run, then those that wait to begin, both in the list's order, then
    // the free ones, that which ended last first. The next line takes the second of these, so that
    // there is always something to share; one place is more than may be in use.
    Place places[PLACES + 1], *active[PLACES + 1];
    int n_places, n_running, n_active;  // that may be in use (<= -b); that run; that run or wait
    Place *ready[PLACES];   // those whose last token has run; row i of x is that of ready[i]
    int n_ready;
    int *users, n_unused;   // (State.blocks) texts that have this block; blocks that nobody has
    char where[640];        // the line that was read last, for messages
    size_t rows, prompts, cached, answers;  // tokens: that have run; of prompts; shared; drawn
    size_t endings[INTERRUPTED + 1], thinking;  // answers by their end; that ended inside thinking
    size_t pieces;          // texts that are scored in pieces
    double start, size, consumed;  // the time; bytes of the file, if known; of its lines so far
} List;

// A line is there, or what is wrong with its text has been said. Writes it and those after it that
// are done, if all before it are written.
static void line_done(List *l, Buffer *line, bool good) {
    if (!good) line->n = 0, buffer_add(line, bytes("null\n"));
    l->failed |= !good;
    l->ahead += line->n;
    for (; (line = &l->lines[l->written % AHEAD])->n && !interrupted; l->written++) {
        if (l->app->writer.terminal) progress_end();
        write_stdout(bytes_of(line));
        l->ahead -= line->n;
        free(line->p);
        *line = (Buffer){0};
    }
}

static void take_block(List *l, Place *p, int block) {  // -1: the first that nobody has
    if (block < 0) while (l->users[++block]) {}
    l->n_unused -= l->users[block]++ == 0;
    p->answer.text.blocks[p->n_blocks++] = block;
}

static void drop_blocks(List *l, Place *p) {
    while (p->n_blocks > 0) l->n_unused += --l->users[p->answer.text.blocks[--p->n_blocks]] == 0;
    p->run = 0;
}

// Are n blocks unused? Until they are, the texts that do not run lose theirs:
// first the one that ended the longest time ago, last the first one that waits.
static bool find_blocks(List *l, int n) {
    for (int i = l->n_places; i >= l->n_running && l->n_unused < n; i--)
        drop_blocks(l, l->active[i]);
    return l->n_unused >= n;
}

// The first text that waits gets the blocks for its tokens so far. Those that it shares with the
// text most like it count as having run; its last token always runs, as that makes the first
// logits. False: it waits until what it could share has run (less than a block is not worth
// waiting), or for blocks: beside its own, one is left for each text that runs, so that none has to
// give its blocks back at once. If no text runs, all blocks are there, and any text begins.
static bool begin(List *l) {
    Place *p = l->active[l->n_running], *like = p;
    const Ids *ids = &p->answer.text.ids;
    const size_t len = l->app->engine.model.state.block_len;
    const int n_blocks = (int)((ids->n + len - 1) / len);
    size_t same = p->run;
    for (Place *other = l->places; other <= l->places + l->n_places; other++) {
        const Ids *its = &other->answer.text.ids;
        size_t n = 0;
        while (other->n_blocks && n + 1 < ids->n && n < its->n && ids->p[n] == its->p[n]) n++;
        if (n > same && other != p) same = n, like = other;
    }
    if (same >= like->run + len) return false;
    same = min_size(same, like->run);
    const int *theirs = like->answer.text.blocks, whole = (int)(same / len);
    if (like != p) {
        drop_blocks(l, p);
        while (p->n_blocks < whole) take_block(l, p, theirs[p->n_blocks]);
        p->run = whole * len;
    }
    l->n_running++;  // from now on find_blocks leaves p its blocks
    if (!find_blocks(l, n_blocks - p->n_blocks + l->n_running) && l->n_running > 1) {
        l->n_running--;
        return false;
    }
    while (p->n_blocks < n_blocks) take_block(l, p, -1);
    // `like` may just have lost its block, even to p; what it holds is still there.
    if (same % len)
        cache_copy(&l->app->engine.model, p->answer.text.blocks[whole], theirs[whole]);
    p->run = same;
    l->cached -= p->cached;  // of a text that begins again, only this time counts
    p->cached = min_size(same, ids->n - p->drawn.n);
    l->cached += p->cached;
    return true;
}

#define refuse(...) (report(__VA_ARGS__), false)  // only this line fails

// Encodes a line. False: it can't run, which it says, or this is Ctrl-C and these are not all ids.
static bool encode_line(List *l, Bytes line, Ids *ids) {
    App *app = l->app;
    const Options *o = &app->options;
    const Model *m = &app->engine.model;
    const Tokenizer *tok = &app->engine.tokenizer;
    const bool chat = app->mode == CHAT;
    const Bytes before = bytes(o->text ? o->text : "");
    Conversation *talk = &app->conversation;  // its messages, or its text as one
    Json j = {.rest = line, .text = &app->input};
    size_t size = 0;
    if (line.n + before.n > MOST_BYTES)
        return refuse("%s: too long, expected less than 2 GB", l->where);
    conversation_drop(talk, 0, talk->n);
    if (chat && o->system) conversation_add(talk, SYSTEM, bytes(o->system));
    if (l->read == 0) json_take(&j, "\uFEFF");  // a byte order mark
    if (o->json_list) json_line(&j, chat ? talk : NULL);
    const char *found = !j.rest.n ? "the end" : !*j.rest.p ? "a NUL" : "";
    if (j.expected)
        return refuse("%s: bad JSON at byte %zu, expected %s, found %s%.*s", l->where,
                      line.n - j.rest.n + 1, j.expected, found, (int)min_size(j.rest.n, 16),
                      j.rest.p);
    if (!talk->n || talk->p[talk->n - 1].role != USER) {  // these are no messages
        Buffer *text = &conversation_add(talk, USER, before)->text;
        if (o->text) buffer_add(text, bytes("\n\n"));
        buffer_add(text, o->json_list ? bytes_of(j.text) : line);
    }
    for (size_t i = 0; i < talk->n; i++)  // an earlier answer may lose its thinking
        size += talk->p[i].role == ASSISTANT ? 0 : talk->p[i].text.n;
    if (l->together && size / 4 > tok->longest * m->state.seq_len)  // NFC may quarter it
        return refuse("%s: too long, expected at most %d tokens (-c, up to %d), found %zu bytes",
                      l->where, m->state.seq_len, m->config.max_seq_len, size);
    ids->n = 0;
    if (chat) render(tok, talk, 0, switched_on(app), ids);
    else encode_text(app, bytes_of(&talk->p[0].text), ids);
    return !interrupted && check_length(app, l->where, ids->n);
}

// Reads a text: it gets a place or, if it is bad or texts do not run together, its line at once.
static void add_line(List *l, Bytes line) {
    App *app = l->app;
    Place *p = l->active[l->n_active + 1];
    const Ids *ids = &p->answer.text.ids;
    Buffer *out = &l->lines[l->read % AHEAD];
    give_notices(app);
    if (l->read == 0 && app->mode <= GENERATE && !quiet && !app->options.seeded)
        fprintf(stderr, "seed %llu\n", app->options.seed);
    snprintf(l->where, sizeof(l->where), "%.600s: line %zu", l->in.name, l->read + 1);
    drop_blocks(l, p);
    bool good = encode_line(l, chop(line), &p->answer.text.ids);
    l->consumed += line.n;
    p->number = l->read++;
    if (good) l->prompts += ids->n;
    if (good && l->together) {
        p->text.n = p->cached = 0;
        p->answer.sampler.rng = app->options.seed + p->number;
        answer_start(&p->answer, &app->engine.tokenizer);
        writer_thinks(&p->writer, begins_thinking(app));
        l->active[l->n_active + 1] = l->active[l->n_active];
        l->active[l->n_active++] = p;
        return;
    }
    if (good) l->rows += ids->n;
    if (good && app->mode == TOKENIZE) buffer_add_ids(out, ids);
    if (good && app->mode == PERPLEXITY) {
        l->pieces += ids->n > (size_t)app->engine.model.state.seq_len;
        good = buffer_add_perplexity(out, &app->engine, ids);
        if (!good && !interrupted) report("%s: " NOT_FINITE, l->where);
    }
    line_done(l, out, good);
}

// False: all is done, or Ctrl-C. Else some text runs, and while one does, this does not wait for
// lines that have still to be made: a list may come from another program.
static bool admit(List *l) {
    for (Bytes line;;) {
        const double lines = l->size * l->read / fmax(l->consumed, 1);  // about
        progress_show(l->start, l->written, l->ended ? l->read : lines, "texts", l->rows);
        if (l->ended || l->n_active == l->n_places || l->read - l->written == AHEAD ||
            l->ahead > AHEAD_BYTES || interrupted)
            break;
        l->ended = !next_line(&l->in, &line, l->n_active == 0);
        if (line.n == 0) break;  // the end, or it comes later
        add_line(l, line);
    }
    while (l->n_running < l->n_active && begin(l)) {}
    return l->n_active > 0 && !interrupted;
}

// Each text that runs has a row; there are enough, as n_places <= -b. A prompt has its blocks, but
// a text that decodes may need another one. If there is none, the youngest text, perhaps this one,
// has to wait; it has no rows yet. That never happens to a text that runs alone, as all
// blocks are its own then. Returns false after Ctrl-C.
static bool pass(List *l) {
    const State *s = &l->app->engine.model.state;
    int n = l->n_ready = 0;
    for (int i = 0; i < l->n_running; i++) {
        Place *p = l->active[i];
        const Text *text = &p->answer.text;
        const bool full = p->run == (size_t)p->n_blocks * s->block_len;
        while (full && !find_blocks(l, 1)) l->n_running--;
        if (l->n_running <= i) break;
        if (full) take_block(l, p, -1);
        const int end = s->batch - (l->n_running - i - 1);
        for (; p->run < text->ids.n && n < end; p->run++) {
            const bool last = p->run + 1 == text->ids.n;
            s->rows[n++] = (Row){text->ids.p[p->run], (int)p->run, text, last};
        }
        if (p->run == text->ids.n) l->ready[l->n_ready++] = p;
    }
    l->rows += n;
    return forward(&l->app->engine.model, n);
}

static void sample_job(void *arg, int begin, int end) {
    const List *l = arg;
    const Engine *e = &l->app->engine;
    const int vocab_size = e->tokenizer.vocab_size;
    for (int i = begin; i < end; i++) {
        Place *p = l->ready[i];
        if (l->app->mode == EMBED) {
            const bool good = buffer_add_embedding(&p->text, &e->model, i);
            p->ending = good ? TURN_ENDED : INTERRUPTED;
            continue;
        }
        float *logits = e->model.state.logits + (size_t)i * vocab_size;
        const int id = sample(&p->answer.sampler, logits, vocab_size);
        if (e->max_new == 0) p->ending = LIMIT_REACHED;
        else p->ending = id < 0 ? INTERRUPTED : answer_add(e, &p->answer, id);
        if (p->ending == GOES_ON) ids_add(&p->answer.text.ids, id);
    }
}

// Writes the texts that have ended. Their places become the first of those that are free.
static void write_ended(List *l) {
    const bool embeds = l->app->mode == EMBED;
    for (int i = 0, at; i < l->n_ready; i++) {
        Place *p = l->ready[i];
        Buffer *line = &l->lines[p->number % AHEAD];
        if (p->ending == GOES_ON) continue;
        if (p->ending == INTERRUPTED)
            report("%s: line %zu: %s", l->in.name, p->number + 1, embeds ? BAD_VECTOR : NOT_FINITE);
        l->endings[p->ending]++;
        l->thinking += p->writer.thinking;
        l->answers += p->drawn.n;
        writer_end(&p->writer);
        if (embeds) buffer_add(line, bytes_of(&p->text));
        else buffer_add_json(line, bytes_of(&p->text));
        line_done(l, line, p->ending != INTERRUPTED);
        for (at = 0; l->active[at] != p; at++) {}
        l->n_running--;
        l->n_active--;
        memmove(l->active + at, l->active + at + 1, (l->n_active - at) * sizeof(*l->active));
        l->active[l->n_active] = p;
    }
}

// Notices and statistics at the end
static int list_end(const List *l) {
    const double seconds = now() - l->start + 1e-9, rate = l->answers / seconds;
    const unsigned long long seed = l->app->options.seed, next = seed + l->written;
    const int context = l->app->engine.model.state.seq_len, most = l->app->options.n;
    const size_t limited = l->endings[LIMIT_REACHED], full = l->endings[CONTEXT_ENDED];
    const bool draws = l->app->mode <= GENERATE;
    const int status = interrupted ? EXIT_INTERRUPT : l->failed ? EXIT_FAILURE : EXIT_SUCCESS;
    char again[64];  // the options that run the rest
    const int n = snprintf(again, sizeof(again), "-%c -", l->app->options.list ? 'l' : 'L');
    if (draws) snprintf(again + n, sizeof(again) - n, " -s %llu", next);
    progress_end();
    if (quiet) return status;
    if (limited) notice("answers: ended by -n after %d tokens: %zu", most, limited);
    if (full) notice("answers: ended by a full context of %d tokens (-c): %zu", context, full);
    if (l->thinking) notice("answers: ended inside their thinking: %zu", l->thinking);
    if (l->pieces) notice("texts: scored in pieces of %d tokens (-c): %zu", context, l->pieces);
    if (interrupted)
        notice("list: %zu lines are written; to go on: tail -n +%zu, %s >>", l->written,
               l->written + 1, again);
    fprintf(stderr, "%zu texts, prompts %zu tokens (%zu cached)", l->written, l->prompts,
            l->cached);
    if (draws && l->written)
        fprintf(stderr, ", answers %zu tokens at %.*f/s, seeds %llu to %llu", l->answers,
                rate < 999.95, rate, seed, next - 1);
    fputc('\n', stderr);
    return status;
}

static int run_list(App *app) {
    static List list;
    List *l = &list;
    const Options *o = &app->options;
    const State *s = &app->engine.model.state;
    const char *file = o->list ? o->list : o->json_list, *name = strcmp(file, "-") ? file : "stdin";
    *l = (List){.app = app, .in = {.fd = file_open(file), .name = name}, .start = now(),
                .together = app->mode != TOKENIZE && app->mode != PERPLEXITY,
                .n_places = max_int(min_int(PLACES, s->batch), 1), .n_unused = s->blocks,
                .users = alloc(s->blocks, sizeof(int), "the list")};
    if (l->in.fd < 0) die("%s: %s", name, strerror(errno));
    l->size = file_size(l->in.fd);
    for (int i = 0; i <= l->n_places; i++) {  // what is never touched takes no memory
        Place *p = l->active[i] = &l->places[i];
        prepare_answer(app, &p->answer, &p->writer, &p->text);
        p->answer.text.blocks = alloc(s->seq_len, sizeof(int), "the list");
        p->answer.drawn = &p->drawn;
    }
    patience = 0;
    while (admit(l) && pass(l)) {
        if (l->n_ready && app->mode != EMBED) classify(&app->engine.model, 0, l->n_ready);
        parallel(sample_job, l, l->n_ready, 1);
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
    "  -L FILE    the same, where a line is JSON: a text, or an array of messages\n"
    "  -m MODE    chat, generate (raw completion), embed, tokenize or perplexity\n"
    "             [what the model is made for: mostly chat]\n"
    "  -y TEXT    system prompt (chat) [none]\n"
    "  -r 0|1     thinking off or on, for models that can switch (chat) [0]\n"
    "  -t FLOAT   temperature, 0 is greedy [the checkpoint's; without thinking 0.7]\n"
    "  -p FLOAT   top-p, above 0 and up to 1 [the checkpoint's; without thinking 0.8]\n"
    "  -k INT     top-k, 0 is off [the checkpoint's; without thinking 20]\n"
    "  -a FLOAT   presence penalty on tokens already generated, 0 to 2 [0]\n"
    "  -e FLOAT   repetition penalty, 1 is off [the checkpoint's]\n"
    "  -x TEXT    end the answer before TEXT (chat, generate) [none]\n"
    "  -s INT     random seed, 64 bits [from the clock, below 1000000]\n"
    "  -n INT     at most so many new tokens per answer, -1 is no limit [-1]\n"
    "  -c INT     context in tokens, 0 is the model's [4096, or the model's if less]\n"
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
    double low, high;       // the least and the greatest value; of a TEXT, number of bytes
    const char *expected;   // what the value should be; NULL: a number from low to high
    const char *others[2];  // what other programs call it
} Option;

#define PLACE(name) offsetof(Options, name)

static const Option options[] = {  // those with a value
    {'i', TEXT, PLACE(text), 0, INT_MAX, NULL, {"--prompt"}},
    {'f', TEXT, PLACE(file), 1, INT_MAX, "a file's name, or -", {"--file"}},
    {'l', TEXT, PLACE(list), 1, INT_MAX, "a file's name, or -", {NULL}},
    {'L', TEXT, PLACE(json_list), 1, INT_MAX, "a file's name, or -", {NULL}},
    {'m', MODE, PLACE(mode), 0, N_MODES - 1,
     "chat, generate, embed, tokenize or perplexity (MODEL goes without -m)", {NULL}},
    {'y', TEXT, PLACE(system), 0, INT_MAX, NULL, {"--system-prompt", "--system"}},
    {'r', INTEGER, PLACE(think), 0, 1, NULL, {NULL}},
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
            die_usage("%s: unknown option, expected a space: -%c %s", arg, letter, arg + 2);
        if (other && strlen(other) == n && !strncmp(arg, other, n))
            die_usage("%s: unknown option, expected -%c; -h lists all", arg, letter);
    }
    if (arg[0] == '-')
        die_usage("%s: unknown option, expected one that -h lists (MODEL without an option)", arg);
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
        die_usage("-%c: bad value, expected %s, found \"%s\"", option->letter,
                  option->expected ? option->expected : range, value);
    if (option->type == REAL) *(float *)place = (float)number;
    if (option->type == MODE || option->type == INTEGER) *(int *)place = (int)number;
}

// Only chat and generate can begin without a text.
static void check_text(const Options *o, int mode) {
    if (mode > GENERATE && !o->text && !o->file && !is_list(o))
        die_usage("-m %s: no text, expected -i TEXT, -f FILE or a pipe", mode_names[mode]);
}

static Options parse_options(int argc, char **argv) {
    Options o = {.mode = -1, .think = -1, .temperature = -1, .top_p = -1, .top_k = -1, .n = -1,
                 .repetition = -1, .context = -1, .batch = 512, .threads = -1,
                 .seed = (uint64_t)(now() * 1e6) % 1000000};
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        const bool help = !strcmp(arg, "-h") || !strcmp(arg, "--help");
        if (help || !strcmp(arg, "--version")) {
            write_stdout(bytes(version()));
            if (help) write_stdout(bytes(usage));
            exit(EXIT_SUCCESS);
        }
        if (!strcmp(arg, "-q")) quiet = true;
        else if (!strcmp(arg, "-v")) o.verbose = true;
        else if (arg[0] != '-' && !o.model) o.model = arg;
        else set_option(&o, option_named(arg, o.model), argv[++i]);  // NULL after the last one
    }
    if (!o.model || !*o.model) die_usage("MODEL: missing, expected a .bin file; -h shows more");
    if (quiet && o.verbose) die_usage("-q, -v: both given, expected one of them");
    if (is_list(&o) && (o.file || o.verbose || (o.list && o.json_list)))
        die_usage("-l, -L: a list, expected one of them, without -f and -v");
    if (!o.text && !o.file && o.mode != CHAT && !is_terminal(STDIN_FILENO)) o.file = "-";
    check_text(&o, o.mode);
    return o;
}

// Reads the prompt. False: there is none, this is a conversation.
static bool read_prompt(App *app) {
    const Options *o = &app->options;
    Buffer *text = &app->input;
    const bool chat = app->mode == CHAT, piped = o->file && !strcmp(o->file, "-");
    check_text(o, app->mode);
    if (o->text) buffer_add(text, bytes(o->text));
    if (!o->file) return o->text || !chat;  // generate can begin from nothing
    if (o->text) buffer_add(text, bytes("\n\n"));
    const size_t before = text->n;
    const char *error = file_read(text, o->file);
    if (error) die("%s: %s", piped ? "stdin" : o->file, error);
    if (chat && piped && text->n == before)
        die("stdin: empty, expected a prompt; has a command before the pipe failed?");
    if (chat) text->n = before + chop(bytes_from(bytes_of(text), before)).n;
    return true;
}

static void load(App *app) {
    const Options *o = &app->options;
    Engine *e = &app->engine;
    const Config *c = &e->model.config;
    const char *path = o->model, *slash = strchr(path, '/');  // a model's name on the hub has one
    bool named = slash && !strchr(slash + 1, '/') && !strchr("./~", *path) && !strstr(path, ".bin");
    const unsigned mode = file_mode(path);
    char tokenizer[4096];
    if (S_ISDIR(mode)) die_export(path, "a directory", INT_MAX, path);
    if (named && !mode) die_export(path, "not a file", INT_MAX, path);
    model_map(&e->model, path);
    snprintf(tokenizer, sizeof(tokenizer), "%s.tokenizer", path);
    if (!file_mode(tokenizer))
        die("%s: missing, expected beside the model, where export.py writes it", tokenizer);
    tokenizer_load(&e->tokenizer, tokenizer, c->vocab_size);
    app->mode = o->mode < 0 ? e->tokenizer.mode : (Mode)o->mode;
    const int least = app->mode == PERPLEXITY ? 2 : 1, most = c->max_seq_len;
    const int context = o->context > 0 ? o->context : o->context < 0 ? min_int(4096, most) : most;
    if (context < least || context > most)
        die("-c: expected %d to %d (export.py --yarn raises it), found %d", least, most, context);
    if (app->mode == TOKENIZE) return;
    start_threads(o->threads > 0 ? o->threads : cpu_count());
    const int places = min_int(PLACES, o->batch);  // logits that nobody needs take no memory
    state_init(&e->model, context, o->batch, places, is_list(o) ? places : 1);
    e->answer.text = whole_cache(&e->model.state);
    e->max_new = o->n;
}

static int run(App *app) {
    const char *system = app->options.system;
    load(app);
    prepare_answer(app, &app->engine.answer, &app->writer, NULL);
    const bool chat = app->mode == CHAT;
    if (chat && system) conversation_add(&app->conversation, SYSTEM, bytes(system));
    if (is_list(&app->options)) return run_list(app);
    const bool single = read_prompt(app);
    if (app->mode != TOKENIZE) patience = 1;
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
    return run(&app);
}
#endif

// ================================================================================================
// PART III. THE MACHINE
// ================================================================================================

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#ifdef _WIN32
#include <windows.h>
#else
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
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
// is 0x4B400000 + x, with x rounded to the nearest integer (ties to even), also if x < 0; its low
// byte is that of x.
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
    // into the exponent's place, which gives the float 2^n.
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

// Shifted left by 13, exponent and fraction stand where a float has them. But an exponent e means
// 2^(e - 15), and there it is read as 2^(e - 127): hence the factor 2^112. The highest exponent, of
// infinity and NaN, becomes a float's highest.
INLINE float half_float(uint16_t half) {
    const uint32_t bits = (half & 0x7FFFu) << 13, sign = (half & 0x8000u) << 16;
    const float value = as_float(bits) * 0x1p112f;
    return as_float((uint32_t)load_i32(&value) | sign | (bits >= 0x0F800000 ? 0x7F800000 : 0));
}

// The bits of floats that are not negative have the order of the floats. With an infinity the scale
// is infinite, and all of q8 becomes 0, also there: 0 * infinity is a NaN whose low byte is 0.
static void quantize(const Quantized *out, int t, int at, const float *x, int n, int group) {
    const Quantized row = quantized_row(out, t);
    for (int g = at / group; g < (at + n) / group; g++, x += group) {
        int8_t *q8 = row.q8 + (size_t)g * group;
        int32_t max = 0;
        for (int i = 0; i < group; i++) max = max_int(max, load_i32(x + i) & INT32_MAX);  // of |x|
        const float largest = as_float(max);
        row.scale[g] = largest < FLT_MIN * 127 ? 0 : largest / 127;
        const float inverse = row.scale[g] != 0 ? 127 / largest : 0;
        int sum = 0;
        for (int i = 0; i < group; i++) {
            const float shifted = x[i] * inverse + ROUNDER;
            q8[i] = (int8_t)load_i32(&shifted);
            sum += q8[i];
        }
        row.bias_fix[g] = -128 * sum;
    }
}

// ------------------------------------------------------------------------------------------------
// Threads: a pool that runs one loop at a time. An idle worker spins for a moment and then sleeps,
// so that it takes no CPU time from other programs. Who takes which share varies; the results do
// not.

static int n_threads = 1;
static _Thread_local int thread;  // the number of the thread that reads it, from 0 on

INLINE int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

static struct {
    Job job;  // the loop that runs. It and the next three change only while left is 0 and no item
              // runs; a thread reads them only after it has seen left > 0
    void *arg;
    int count, chunk;
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
static void work(void) {
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
        work();
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
    work();
    wait_until(&pool.active, false);
}

static void each_job(void *arg, int begin, int end) {
    const Pass *p = arg;
    for (int i = begin; i < end; i++) p->step(p, i);
}

static void each(Pass *p, Step step, int count, int chunk) {
    p->step = step;
    parallel(each_job, p, count, chunk);
}

// ------------------------------------------------------------------------------------------------
// The work of a layer: heads, SwiGLU and experts, each thread some rows of a matrix at a time

typedef struct {           // W[r] . x[t] for a range of rows r and n tokens t
    const Matrix *w;       // (rows, cols)
    const Quantized *x;    // (n, cols)
    float *out;            // the result's place: out[t * stride + r - row_begin]
    int stride, row_begin, row_end, n;
    bool add;              // out += instead of out =
    struct Workspace *own; // of the thread that computes it
} Matmul;

static void matmul_rows(const Matmul *part);  // all of it, in the calling thread

typedef struct Workspace {  // one thread's own buffers
    float *scratch;    // (batch, head_dim or 2 * group_size, whichever is more)
    void *panel;       // what a product keeps while it runs: see panel_bytes
    float *attention;  // score, q and sum of an AttentionTask
} Workspace;

static float *scratch(const State *s) { return s->workspace[thread].scratch; }

// out[t * stride + i] = W[row + i] . x[t] for i < rows and t < n
static void multiply(const State *s, float *out, int stride, const Matrix *w, int row, int rows,
                     const Quantized *x, int n) {
    matmul_rows(&(Matmul){.w = w, .x = x, .out = out, .stride = stride, .row_begin = row,
                          .row_end = row + rows, .n = n, .own = &s->workspace[thread]});
}

static void project(const Pass *p, float *out, int stride, const Matrix *w, const float *bias,
                    int head) {
    const int head_dim = p->c->head_dim, row = head * head_dim;
    multiply(p->s, out, stride, w, row, head_dim, &p->s->xq, p->n);
    for (int t = 0; bias && t < p->n; t++) {
        for (int j = 0; j < head_dim; j++) out[(size_t)t * stride + j] += bias[row + j];
    }
}

// Which experts run for which tokens. If token 0 chose experts 2 and 5, token 1 experts 5 and 7,
// and token 2 experts 2 and 5, then expert is 2 5 7, token is 0 2  0 1 2  1, and place is 0 2 5 6.
// A model without experts has expert 0 alone, which runs for all tokens.
typedef struct Routing {
    float *share;  // (batch, n_experts)  first Wr h; then p of the chosen experts, 0 for the others
    int n_active;  // how many experts were chosen by at least one token of the batch
    int *expert;   // (n_experts)         expert[0 .. n_active - 1] are these, ascending
    int *place;    // (n_experts + 1)     row i of State.hq belongs to expert[k] if i is in
                   //                     place[k] .. place[k + 1] - 1,
    int *token;    // (batch * n_experts_used)       and to token[i]
    Quantized xq;  // (batch * n_experts_used, dim)  row i is State.xq of token[i]
} Routing;

// Item i is group i % n_groups of the rows of hq that belong to expert[i / n_groups]. `scratch` is
// small, to stay in the CPU's caches: for W1 h and W3 h of n tokens it has room for batch / n
// groups, so each round computes at most that many.
static void swiglu_job(void *arg, int begin, int end) {
    const Pass *p = arg;
    const State *s = p->s;
    const Routing *r = s->routing;
    const int group = p->c->group_size, n_groups = p->c->hidden_dim / group;
    for (int i = begin, count; i < end; i += count) {
        const int k = i / n_groups, g = i % n_groups, place = r->place[k];
        const int n = r->place[k + 1] - place, row = (r->expert[k] * n_groups + g) * group;
        const Quantized x = quantized_row(&r->xq, place);
        count = min_int(min_int(end - i, n_groups - g), s->batch / max_int(n, 1));
        const int cols = count * group;
        float *gate = scratch(s), *up = gate + n * cols;
        multiply(s, gate, cols, &p->w->w1, row, cols, &x, n);
        multiply(s, up, cols, &p->w->w3, row, cols, &x, n);
        for (int t = 0; t < n; t++, gate += cols, up += cols) {
            silu_times(gate, up, cols);
            quantize(&s->hq, place + t, g * group, gate, cols, group);
        }
    }
}

static void swiglu(Pass *p) {
    Routing *r = p->s->routing;
    if (!p->w->router) r->place[1] = p->n;
    parallel(swiglu_job, p, r->n_active * (p->c->hidden_dim / p->c->group_size), 1);
}

// share[t][e] = Wr[e] . h[t], its terms added in the order of sum_of
static void score_expert(const Pass *p, int i) {
    const int dim = p->c->dim, t = i / p->c->n_experts, e = i % p->c->n_experts;
    const float *w = p->w->router + (size_t)e * dim, *h = p->s->h + (size_t)t * dim;
    float sums[16] = {0};
    for (int j = 0; j < dim; j += 16) {
        for (int k = 0; k < 16; k++) sums[k] = mul_add(w[j + k], h[j + k], sums[k]);
    }
    p->s->routing->share[i] = sum_of(sums, 16, false);
}

// share becomes p; row t of h, which nobody needs any more, the sum of the experts' outputs so far
static void choose_row(const Pass *p, int t) {
    const size_t dim = p->c->dim;
    const bool chosen = choose_experts(p->c, p->s->routing->share + (size_t)t * p->c->n_experts);
    if (!chosen) p->s->x[t * dim] = NAN;  // reaches the logits, and the answer ends
    memset(p->s->h + t * dim, 0, dim * sizeof(float));
}

static void gather_row(const Pass *p, int i) {  // a whole vector: q8, scale and bias_fix
    const Routing *r = p->s->routing;
    const Quantized from = quantized_row(&p->s->xq, r->token[i]), to = quantized_row(&r->xq, i);
    memcpy(to.q8, from.q8, to.stride * 4);
}

// Adds the experts' outputs to groups begin .. end - 1 of each token's x. One call adds all experts
// to an element, in ascending order, so that the result does not depend on the threads.
static void experts_output_job(void *arg, int begin, int end) {
    const Pass *p = arg;
    const State *s = p->s;
    const Routing *r = s->routing;
    const int dim = p->c->dim, group = p->c->group_size;
    for (int k = 0; k < r->n_active; k++) {
        const int e = r->expert[k], place = r->place[k], n = r->place[k + 1] - place;
        const Quantized hq = quantized_row(&s->hq, place);
        for (int at = begin * group; at < end * group; at += group) {
            float *out = scratch(s);
            multiply(s, out, group, &p->w->w2, e * dim + at, group, &hq, n);
            for (int j = 0; j < n; j++, out += group) {
                const int t = r->token[place + j];
                const float share = r->share[(size_t)t * p->c->n_experts + e];
                float *sum = s->h + (size_t)t * dim + at;
                for (int i = 0; i < group; i++) sum[i] += share * out[i];
            }
        }
    }
    for (int t = 0; t < p->n; t++) {
        float *x = s->x + (size_t)t * dim, *sum = s->h + (size_t)t * dim;
        for (int i = begin * group; i < end * group; i++) x[i] += sum[i];
    }
}

static void experts(Pass *p) {
    const int n_experts = p->c->n_experts;
    Routing *r = p->s->routing;
    each(p, score_expert, p->n * n_experts, 8);
    each(p, choose_row, p->n, 4);
    r->n_active = 0;
    for (int e = 0, n = 0; e < n_experts; e++) {
        for (int t = 0; t < p->n; t++) {
            if (r->share[(size_t)t * n_experts + e] != 0) r->token[n++] = t;
        }
        if (n == r->place[r->n_active]) continue;  // nobody chose e
        r->expert[r->n_active++] = e;
        r->place[r->n_active] = n;
    }
    each(p, gather_row, r->place[r->n_active], 16);
    swiglu(p);
    parallel(experts_output_job, p, p->c->dim / p->c->group_size, 1);
}

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
#elif defined(USE_AVX2)
#define ZIP(a, b, i) SHUFFLE(a, b, i, i + 8, i + 1, i + 9, i + 2, i + 10, i + 3, i + 11)
#else
#define ZIP(a, b, i) SHUFFLE(a, b, i, i + 4, i + 1, i + 5)
#endif
INLINE VecI zip_low(VecI a, VecI b) { return ZIP(a, b, 0); }
INLINE VecI zip_high(VecI a, VecI b) { return ZIP(a, b, LANES / 2); }

#if defined(USE_AVX512)
INLINE VecI add_pairs(VecI a, VecI b) {
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
#elif defined(USE_AVX2)
INLINE VecI add_pairs(VecI a, VecI b) {
    return (VecI)_mm256_permute4x64_epi64(_mm256_hadd_epi32((__m256i)a, (__m256i)b), 0xD8);
}
#else
INLINE VecI add_pairs(VecI a, VecI b) {
    return SHUFFLE(a, b, 0, 2, 4, 6) + SHUFFLE(a, b, 1, 3, 5, 7);
}
#endif

static const char *version(void) { return "qwen3 1.0 (" SIMD ")\n"; }

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
// Matrix products: out = x W^T, as dot_row defines each element. A term is a group's exact dot
// product times the weights' scale; an element is the sum of its terms, each times x's scale.
//
// For a few tokens, reading the weights takes the time: matvec_rows takes them as they lie, as one
// sequence of groups, and makes LANES terms at a time. For more tokens, arithmetic takes the time:
// matmul_panels transposes a panel of rows, so that each lane is a row, and multiplies it with all
// tokens, tile by tile.

// Transposes LANES rows of `words`, a (rows, cols) array of 4-byte words: lane r of out[i * stride]
// is word i of row `row` + r, ^ flip. Past the end the last row is repeated; its results are
// discarded.
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
    int8_t *low, *high;  // 8 bits: the groups of q8, nothing. 4 bits: their first, second halves
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

// The terms of LANES groups: of w from its group `first` on, of x from its group g on. dots[v]
// holds the partial sums of one group, or of several that are smaller than a vector, side by side;
// sum_each makes a lane of each group.
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

// Token t, the LANES rows from `row` on, or the last ones before row_end, of which only those from
// `row` on are put: the terms of their groups, LANES at a time; then, transposed, added with a row
// in each lane.
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
    // What is added to is prefetched: rows of out, 4 KB apart in the 0.6B, share a few sets of a
    // cache, so that they leave it early.
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
    const int group = w->group, n_groups = w->cols / group, half = group / 8;
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
                scales[r * n_groups + g] = weight_scale(w, from_row, g, group);
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

static void matmul(const State *s, float *out, const Matrix *w, const Quantized *x, int n,
                   bool add) {
    Matmul all = {.w = w, .x = x, .out = out, .stride = w->rows, .n = n, .add = add,
                  .own = s->workspace};
    parallel(matmul_job, &all, (w->rows + PANEL_ROWS - 1) / PANEL_ROWS, 1);
}

static int draft_rows(void) { return TILE_TOKENS; }

// ------------------------------------------------------------------------------------------------
// The KV cache and attention
//
// The cache is a pool of blocks of LANES positions (the floats of a SIMD vector). Text.blocks says
// which of them hold a text's positions (a paged cache, arXiv 2309.06180). A block has all layers
// and kv heads, so memory is touched only as positions come into use. It has, for each of them,
//
//   keys    (head_dim, LANES positions)
//   values  (value_dim / LANES, LANES positions, LANES columns)
//
// so that a vector of keys gives a vector of scores, one of values LANES columns of the result; and
// a tile (below) reads its keys from front to back, its values as one unbroken part of each block.

// Columns of the values: head_dim, and zeros up to whole tiles
static int value_dim(const Config *c) { return round_up(c->head_dim, 2 * LANES); }

// Where in the cache the keys of a pair (layer, kv head) in a block begin. The number of pairs is
// made odd: with an even one, all blocks of a head would share a fraction of the L2 cache's sets.
// Block 1 begins after the floats of block 0: so block_at(c, 1, 0) is a block's size.
static size_t block_at(const Config *c, size_t block, size_t pair) {
    const size_t pairs = (size_t)c->n_layers * c->n_kv_heads | 1;
    return (block * pairs + pair) * LANES * (c->head_dim + value_dim(c));
}

static float *cache_block(const Pass *p, const Text *text, int kv_head, int pos) {
    const size_t pair = p->l * p->c->n_kv_heads + kv_head;
    return p->s->cache + block_at(p->c, text->blocks[pos / LANES], pair);
}

static float *key_at(const Pass *p, const Text *text, int kv_head, int pos, int j) {
    return cache_block(p, text, kv_head, pos) + j * LANES + pos % LANES;
}

static float *value_at(const Pass *p, const Text *text, int kv_head, int pos, int j) {
    const int vector = p->c->head_dim + j / LANES * LANES + pos % LANES;
    return cache_block(p, text, kv_head, pos) + vector * LANES + j % LANES;
}

// A query of attention is one query head of one row. It goes through the positions in spans and
// keeps the scores of one span only, as in FlashAttention (arXiv 2205.14135): each span has a
// softmax relative to the largest score there, which span_softmax joins with those before. The
// queries of a kv head are those of all query heads that share it, row by row. A task is up to
// ATT_TASK of them, all of one text, so that a span's keys and values (256 KB if head_dim is 128)
// come to L2 once. A tile is ATT_QUERIES of them, or 2 in a task of few, as in decoding, by 2
// vectors, of positions for the scores, of columns for the values; its sums stay in registers.
enum { SPAN = 256, ATT_TASK = 96, ATT_QUERIES = LANES == 16 ? 12 : 6 };
enum { SCORE_STRIDE = SPAN + LANES };  // rows a multiple of 1 KB apart would share L1 sets
_Static_assert(SPAN % 32 == 0 && ATT_TASK % ATT_QUERIES == 0, "whole tiles");

typedef struct {
    float *score;            // (ATT_TASK, SCORE_STRIDE)  of the span, then the terms
    float *q;                // (head_dim, ATT_TASK)      transposed: a tile's are neighbours
    float *sum;              // (ATT_TASK, value_dim)     of the terms times the values, so far
    const Pass *p;
    const Text *text;
    int kv_head;
    int n;                   // queries, rounded up to whole tiles: the last one is repeated
    int start, end;          // the span: positions start .. end - 1, start a multiple of SPAN
    float *out[ATT_TASK];    // (head_dim)                each query's place in State.a
    int len[ATT_TASK];       // positions that each query sees, its own and those before; ascending
    float max[ATT_TASK], total[ATT_TASK];  // the largest score so far; the sum of the terms
    float keep[ATT_TASK], take[ATT_TASK];  // factors on what was summed before, on this span's sum
} AttentionTask;

// The span's block that holds position pos, or its last one: no later one is sure to exist. Its
// keys come first, head_dim vectors, then its values.
INLINE const VecF *block_of(const AttentionTask *task, int pos) {
    return (VecF *)cache_block(task->p, task->text, task->kv_head, min_int(pos, task->end - 1));
}

// score = q . k / sqrt(head_dim), for `queries` queries from r on and two blocks of positions from
// pos on; what comes after the span's end is overwritten later. The CPU can't foresee where the
// next two blocks are, so the first tile prefetches them for all.
INLINE void score_tile(const AttentionTask *task, int r, int pos, const int queries) {
    const int head_dim = task->p->c->head_dim;
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

// sum = keep * sum + take * (the span's terms times values), for `queries` queries from r on and
// two vectors of columns from vector j on. Prefetches not the next block but the one after it: the
// next may be needed before its prefetch has come.
INLINE void value_tile(const AttentionTask *task, int r, int j, const int queries) {
    const int vectors = value_dim(task->p->c) / LANES, first = task->p->c->head_dim + j * LANES;
    const int end = min_int(task->end, task->len[r + queries - 1]);
    const float *term = task->score + r * SCORE_STRIDE;
    VecF *all = (VecF *)task->sum + r * vectors + j, sum[ATT_QUERIES][2] = {0};
    for (int pos = task->start; pos < end; pos += LANES) {
        const VecF *values = block_of(task, pos) + first;
        const VecF *next = block_of(task, pos + 2 * LANES) + first;
        for (int k = 0; k < min_int(LANES, end - pos); k++, term++) {
            for (int v = 0; v < 2 && r == 0; v++) __builtin_prefetch(next + v * LANES + k);
            UNROLL for (int i = 0; i < queries; i++) {
                const VecF weight = splat_f(term[i * SCORE_STRIDE]);
                UNROLL for (int v = 0; v < 2; v++) {
                    sum[i][v] = mul_add_v(values[v * LANES + k], weight, sum[i][v]);
                }
            }
        }
    }
    UNROLL for (int i = 0; i < queries; i++, all += vectors) {
        const VecF keep = splat_f(task->keep[r + i]), take = splat_f(task->take[r + i]);
        UNROLL for (int v = 0; v < 2; v++) all[v] = mul_add_v(all[v], keep, sum[i][v] * take);
    }
}

// Each query's scores become the terms exp(score - max). Positions after its own get -INFINITY, so
// that their terms are 0 (causal), up to a multiple of 16: sum_of is slow with a rest. If a query
// sees nothing of the span (or all scores overflow), max is -FLT_MAX instead, as -INFINITY -
// -INFINITY is NaN. What was summed before and what the span adds become relative to the larger
// max, by the factors keep and take.
static void span_softmax(AttentionTask *task) {
    const int width = round_up(task->end - task->start, 16);
    float *score = task->score;
    for (int r = 0; r < task->n; r++, score += SCORE_STRIDE) {
        for (int i = max_int(task->len[r] - task->start, 0); i < width; i++) score[i] = -INFINITY;
        const float max = fmaxf(max_of(score, width), -FLT_MAX), larger = fmaxf(max, task->max[r]);
        const float total = softmax_terms(score, width, max);
        task->keep[r] = fast_exp(task->max[r] - larger);
        task->take[r] = fast_exp(max - larger);
        task->total[r] = mul_add(task->total[r], task->keep[r], total * task->take[r]);
        task->max[r] = larger;
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
    for (int j = 0; j < value_dim(task->p->c) / LANES; j += 2) {
        for (int r = 0; r < task->n; r += queries) value_tile(task, r, j, queries);
    }
}

// Attention of queries first .. first + count - 1 of a kv head, all of one text
static void attend_task(const Pass *p, const Text *text, int kv_head, int first, int count) {
    const Config *c = p->c;
    const int per_kv = c->n_heads / c->n_kv_heads, columns = value_dim(c);
    float *score = p->s->workspace[thread].attention, *q = score + ATT_TASK * SCORE_STRIDE;
    AttentionTask task = {.score = score, .q = q, .sum = q + ATT_TASK * c->head_dim,
                          .p = p, .text = text, .kv_head = kv_head,
                          .n = round_up(count, 2 * count <= ATT_QUERIES ? 2 : ATT_QUERIES)};
    for (int r = 0; r < task.n; r++) {
        const int query = first + min_int(r, count - 1), t = query / per_kv;
        const int head = kv_head * per_kv + query % per_kv;
        const size_t at = (size_t)t * c->q_dim + head * c->head_dim;
        for (int j = 0; j < c->head_dim; j++) q[j * ATT_TASK + r] = p->s->q[at + j];
        task.out[r] = p->s->a + at;
        task.len[r] = p->s->rows[t].pos + 1;
        task.max[r] = -INFINITY;
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
    const Pass *p = arg;
    const Row *rows = p->s->rows;
    const int per_kv = p->c->n_heads / p->c->n_kv_heads, per_head = p->n * per_kv;
    for (int i = begin, count; i < end; i += count) {
        const int first = i % per_head, left = min_int(end - i, per_head - first);
        const int most = min_int(left, ATT_TASK);
        const Text *text = rows[first / per_kv].text;
        for (count = 1; count < most && rows[(first + count) / per_kv].text == text;) count++;
        attend_task(p, text, i / per_head, first, count);
    }
}

// A thread takes at least as many queries as a row and as a tile have, if there are as many.
static void attend_all(Pass *p) {
    const int per_kv = p->c->n_heads / p->c->n_kv_heads, n = p->n * per_kv;
    parallel(attend_job, p, n * p->c->n_kv_heads, min_int(n, round_up(per_kv, ATT_QUERIES)));
}

// ------------------------------------------------------------------------------------------------
// The memory of a run: everything that a pass needs is allocated here, once

static void *activations(size_t count, size_t size) {
    return alloc(count, size, "the activations (-b makes them smaller)");
}

static float *floats(size_t count) { return activations(count, sizeof(float)); }

// Spare rows follow, because the last tile of a product may read past the n rows.
static Quantized quantized_init(size_t n, int cols, int group) {
    const size_t words = cols / 4, n_groups = cols / group;
    const size_t stride = (words + 2 * n_groups + 15) / 16 * 16;  // rows are aligned to 64 bytes
    int32_t *p = activations((n + TILE_TOKENS) * stride, sizeof(*p));
    return (Quantized){(int8_t *)p, (float *)p + words, p + words + n_groups, stride};
}

static int most_blocks = INT_MAX;  // tests make it small

// The blocks of `texts` texts, but at most a quarter of the memory, and at least those of one text
static int pool_blocks(const Config *c, int seq_len, int texts) {
    const double room = memory_size() / 4 / (block_at(c, 1, 0) * sizeof(float));
    const double one = round_up(seq_len, LANES) / LANES;
    return (int)fmin(one * texts, fmax(one, fmin(room, most_blocks)));
}

static void cache_copy(const Model *m, int to, int from) {
    const size_t size = block_at(&m->config, 1, 0);
    memmove(m->state.cache + to * size, m->state.cache + from * size, size * sizeof(float));
}

// A text alone in the cache has its blocks in their order, and room for seq_len + 1 ids.
static Text whole_cache(const State *s) {
    Text text = {.blocks = alloc(s->blocks, sizeof(int), "the prompt")};
    text.ids.p = alloc((size_t)s->seq_len + 1, sizeof(int), "the prompt");
    for (int i = 0; i < s->blocks; i++) text.blocks[i] = i;
    return text;
}

static void state_init(Model *m, int seq_len, int batch, int logit_rows, int texts) {
    const Config *c = &m->config;
    State *s = &m->state;
    const int widest = max_int(max_int(c->dim, c->q_dim), c->hidden_dim);  // cols of any matrix
    const int n_experts = max_int(c->n_experts, 1), group = c->group_size;
    const size_t n = batch, chosen = n * max_int(c->n_experts_used, 1);
    const size_t task_floats = ATT_TASK * (SCORE_STRIDE + c->head_dim + value_dim(c));
    Routing *r = activations(1, sizeof(Routing));
    *s = (State){.seq_len = seq_len, .batch = batch, .rows = activations(n, sizeof(Row)),
                 .cos = floats(n * c->head_dim / 2), .sin = floats(n * c->head_dim / 2),
                 .x = floats(n * c->dim), .h = floats(n * c->dim),
                 .q = floats(n * c->q_dim), .a = floats(n * c->q_dim),
                 .xq = quantized_init(n, c->dim, group), .aq = quantized_init(n, c->q_dim, group),
                 .hq = quantized_init(chosen, c->hidden_dim, group),
                 .logits = floats((size_t)logit_rows * c->vocab_size), .logit_rows = logit_rows,
                 .blocks = pool_blocks(c, seq_len, texts), .block_len = LANES, .routing = r};
    *r = (Routing){.share = floats(n * n_experts), .n_active = 1,
                   .expert = activations(n_experts, sizeof(int)),
                   .place = activations(n_experts + 1, sizeof(int)),
                   .token = activations(chosen, sizeof(int)),
                   .xq = c->n_experts ? quantized_init(chosen, c->dim, group) : s->xq};
    s->workspace = activations(n_threads, sizeof(Workspace));
    for (int i = 0; i < n_threads; i++) {
        s->workspace[i] = (Workspace){floats(n * max_int(c->head_dim, 2 * group)),
                                      activations(panel_bytes(widest, group), 1),
                                      floats(task_floats)};
    }
    const size_t size = block_at(c, 1, 0) * sizeof(float);
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

// SIGILL: this CPU is older than the one that the program was built for. SIGBUS: a mapped file has
// become shorter, or its disk fails. If several threads get here, only the first one reports.
static void on_fatal(int signal) {
    static atomic_flag said = ATOMIC_FLAG_INIT;
    const char *text = signal == SIGILL
        ? "qwen3: CPU: lacks an instruction of this build (" SIMD "); make portable is for all\n"
        : "qwen3: model: can't be read any more; has its file been cut, or does its disk fail?\n";
    while (atomic_flag_test_and_set(&said)) {}
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
#define ioctl(fd, request, n) !PeekNamedPipe(handle(fd), NULL, 0, NULL, (DWORD *)(n), NULL)
#define mmap(at, size, protection, flags, fd, offset) map_file(fd)
#define open(path, flags) _wopen(wide(path), (flags) | _O_BINARY)
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

// A limit of this process's cgroup (Linux, version 2), from a file with a number, or with "max" for
// none. cpu.max has two, "QUOTA PERIOD": this is the number of cores.
static double cgroup_limit(const char *name) {
    char group[4000] = "", path[4096];
    double limit, period = 1;
    scan_file("/proc/self/cgroup", "0::%3999[^\n]", group, NULL);
    snprintf(path, sizeof(path), "/sys/fs/cgroup%s/%s", group, name);
    return scan_file(path, "%lf %lf", &limit, &period) > 0 ? limit / period : INFINITY;
}

// Physical cores, as a second thread on a core gains nothing: a core's second CPU counts only if
// its first one is not ours. On macOS the fast cores. Where the system does not tell, all CPUs. At
// most what the cgroup may use.
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

static bool input_ready(int fd) { return poll(&(struct pollfd){fd, POLLIN, 0}, 1, 0) != 0; }

// A pasted block's lines arrive within about 30 ms. Normally the terminal counts only whole lines;
// what follows the last newline is counted only while ICANON is off. (So is Ctrl-D, which would be
// lost then.) Signals are blocked meanwhile: one that ended the program would leave the terminal
// that way.
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
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt}, NULL);  // ends a read, too
}
#endif

static bool is_terminal(int fd) { return isatty(fd); }

static unsigned file_mode(const char *path) {
    struct stat st;
    return stat_file(path, &st) == 0 ? st.st_mode : 0;
}

static int file_open(const char *path) {
    return strcmp(path, "-") == 0 ? STDIN_FILENO : open(path, O_RDONLY);
}

static double file_size(int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? (double)st.st_size : 0;
}

static Bytes file_map(const char *path) {
    const int fd = open(path, O_RDONLY | O_NONBLOCK);  // does not wait for a named pipe's writer
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
        const ssize_t got = read(fd, b->p + b->n, 65536);
        if (got > 0) b->n += got;
        if (got >= 0 || interrupted || (errno != EINTR && errno != EAGAIN)) return got;
        if (errno == EAGAIN) poll(&(struct pollfd){fd, POLLIN, 0}, 1, -1);  // in non-blocking mode
    }
}

static const char *file_read(Buffer *b, const char *path) {
    const int fd = file_open(path);
    ssize_t got = fd < 0 ? -1 : 1;
    while (got > 0 && b->n < INT_MAX) got = read_more(fd, b);
    const char *error = got < 0 ? strerror(errno) : "too long, expected less than 2 GB";
    if (fd > STDIN_FILENO) close(fd);
    return got == 0 ? NULL : error;
}

// It looks without reading or waiting. What a shell's `while read` loop goes through is a file that
// is no longer at its start.
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
        else if (errno != EINTR) die("stdout: %s", strerror(errno));
    }
}
