/* qwen3.c - Qwen3 inference in one C file: no packages, just libc, libm and threads. MIT license.

     ./qwen3 model.bin -i "What is the capital of France?"

   A token is a piece of text, often a word or a part of one, and has a number: its id. A language
   model computes a score for every token that could come next. This program cuts a text into tokens
   (encode_raw, render), runs them through the model (prefill, which calls forward), scores all
   tokens of the vocabulary as the next one (classify), draws one of them (sample), writes it, runs
   it through the model as well (advance), and so on until the answer ends (generate).

   Inside the model, each token of the text is a vector x (dim), the residual stream. (A name is
   followed by its shape in parentheses.) It starts as the token's row of the embedding table, which
   has a learned row for each token of the vocabulary. Each layer then adds two things to it: what
   attention finds in this token and those before it, and what a feed-forward network (three
   matrices and a nonlinear function) computes from the x that results. For attention, matrices make
   a query q, a key k and a value v of each token. The dot products of its query with the keys of
   all positions up to its own become, by softmax, shares that add up to 1; the result is the sum of
   the values, each times its share. This happens n_heads times side by side: each head has its own
   part of q (head_dim), and so looks elsewhere. The KV cache keeps, for each layer, the keys K and
   values V of all earlier positions, a row each. Let pos be the token's position, Wq h the product
   of a matrix and a vector, q . K the dot products of q with the rows of K, and * the product of
   two vectors' elements. All W, rms_ and _norm are learned; eps and theta are numbers of the model,
   mostly 1e-6 and 1e6. One layer is (Qwen3DecoderLayer in HF, Hugging Face's transformers):

     h = rmsnorm(x, rms_att)                  rmsnorm(x, w) = w * x / sqrt(mean(x^2) + eps)
     q = Wq h, k = Wk h, v = Wv h             q: n_heads vectors (head_dim); k, v: n_kv_heads each
     q = rope(rmsnorm(q, q_norm), pos)        QK-norm: each head is normalized by itself
     k = rope(rmsnorm(k, k_norm), pos)
     K = [K; k], V = [V; v]                   k and v are appended to the KV cache
     a = softmax(q . K / sqrt(head_dim)) V    for each query head; softmax(z) = exp(z) / sum(exp(z))
                                              n_heads / n_kv_heads query heads share a K and V. All
                                              heads' a together: (q_dim), n_heads * head_dim
     x = x + Wo a
     h = rmsnorm(x, rms_ffn)
     x = x + W2 (silu(W1 h) * (W3 h))         SwiGLU, with silu(z) = z / (1 + exp(-z))

   A mixture of experts has many experts, each with its own W1, W2 and W3, and a router Wr, which
   chooses for each token the few that run. In place of its last line, a layer then computes

     p = softmax(Wr h)                        one p for each expert
     S = the n_experts_used experts with the largest p
     p = p / (sum of p over S)                so that the p of S add up to 1; some models skip this
     x = x + sum of p[e] W2[e] (silu(W1[e] h) * (W3[e] h)) over e in S

   rope rotates each pair (q[j], q[j + head_dim/2]) by the angle pos * theta^(-2j / head_dim), so
   that q . k depends on the two positions only through their distance.

   After the last layer, the scores, called logits, are

     logits = Wcls rmsnorm(x, rms_final)      one for each token of the vocabulary

   Qwen2 and Qwen2.5 have no QK-norm, but biases: q = Wq h + bq, k = Wk h + bk, v = Wv h + bv.

   All matrices but the router are quantized. With 8 bits, a group of group_size consecutive weights
   of a row is stored as int8 values and one float scale: a weight is its int8 times the scale. The
   layers' matrices may have 4 bits instead: the model has a table of 16 int8 values, the levels,
   and a weight is stored as an index into it, its group's scale as a float of 16 bits. Just before
   a quantized matrix is multiplied with a vector, the vector is quantized to int8 in the same way,
   which the code writes Q8(h). So the dot product of a group of weights and a group of the vector
   is an exact integer, which is then multiplied by the two scales.

   To learn how a language model runs, read Part I: the model first, then text to tokens.

   Part I, the model                         Part II, the program
     Helpers that all parts use                The model file
     Types, with their shapes                  The tokenizer file
     What Parts II and III provide             Unicode
     Math                                      Drafts
     One layer                                 Writing
     The whole model: forward()                Conversation
     Matrix product and attention              The modes
     A mixture of experts                      Options and main
     Texts
     Text to tokens                          Part III, the machine
     The chat format                           Threads
     The sampler                               SIMD primitives
     Generation                                Matrix products
                                               The KV cache and attention
                                               The memory of a run
                                               Progress
                                               POSIX and Windows                                  */

#if __SIZEOF_POINTER__ < 8 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "qwen3.c needs a 64-bit little-endian machine: models are mapped as they are"
#endif

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <float.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

// ================================================================================================
// PART I. THE MODEL
// ================================================================================================

// ------------------------------------------------------------------------------------------------
// Helpers that all parts use: errors, memory, views of bytes

#define INLINE static inline __attribute__((always_inline, unused))
#ifdef __MINGW_PRINTF_FORMAT  // the dialect in which GCC checks formats
#define PRINTF __MINGW_PRINTF_FORMAT
#else
#define PRINTF printf
#endif

enum { EXIT_USAGE = 2, EXIT_INTERRUPT = 130 };

static bool quiet;                         // -q: only errors on stderr
static volatile sig_atomic_t interrupted;  // Ctrl-C was pressed

// Writes one line to stderr, of the form "qwen3: WHERE: WHAT, expected X, found Y" (Part II).
__attribute__((format(PRINTF, 1, 2))) static void report(const char *fmt, ...);

#define die(...) (report(__VA_ARGS__), exit(EXIT_FAILURE))      // a file, memory or model error
#define die_usage(...) (report(__VA_ARGS__), exit(EXIT_USAGE))  // an error in the command line
#define notice(...) (quiet ? (void)0 : report(__VA_ARGS__))     // worth knowing, but not an error

// Returns memory for `count` zeroed elements, aligned to 64 bytes. It is never freed. Pages that
// are never touched take no memory.
static void *alloc(size_t count, size_t size, const char *what) {
    char *p = count < (SIZE_MAX - 64) / size ? calloc(count * size + 64, 1) : NULL;
    if (!p) die("memory: not enough for %s, expected %.0f MB", what, count * (double)size / 1e6);
    return p + (-(uintptr_t)p & 63);
}

typedef struct {  // a view of bytes that something else owns. Texts are never NUL-terminated here.
    const uint8_t *p;
    size_t n;
} Bytes;

typedef struct {  // bytes that grow
    uint8_t *p;
    size_t n, cap;
} Buffer;

typedef struct {  // token ids that grow
    int *p;
    size_t n, cap;
} Ids;

INLINE int min_int(int a, int b) { return a < b ? a : b; }
INLINE int max_int(int a, int b) { return a > b ? a : b; }

INLINE float as_float(uint32_t bits) {  // the float with these bits
    return (union { uint32_t bits; float value; }){bits}.value;
}

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
    int rope_scaling;       // 0: none, 1: YaRN, which needs the next six
    float yarn_factor;
    int yarn_original_len;  // HF original_max_position_embeddings
    float yarn_beta_fast, yarn_beta_slow;
    float yarn_attention_factor;
    int yarn_no_rounding;   // 1: HF truncate = false
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
    const int8_t *q;             // 8 bits: (rows, cols)
    const float *scale;          //         (rows, cols / group)
    const uint8_t *nibbles;      // 4 bits: (rows, cols / 2), two weights in a byte: see weight_q
    const uint16_t *half_scale;  //         (rows, cols / group), floats of 16 bits: see half_float
    const int8_t *levels;        //         (16) the q that a nibble stands for
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

// Q8 of several vectors (cols). A vector's q, scale and bias_fix lie one after the other in one
// block; the blocks follow each other. These pointers are those of vector 0: see quantized_row.
typedef struct {
    int8_t *q;          // (cols)
    float *scale;       // (cols / group)
    int32_t *bias_fix;  // (cols / group) -128 * the sum of a group's q. Only Part III reads it (see
                        // dot4); it has nothing to do with bq, bk and bv
    size_t stride;      // distance between two blocks, in units of 4 bytes
} Quantized;

typedef struct {         // one thread's own buffers
    float *h;            // (dim)                 rmsnorm(x) of one token
    float *kv;           // (batch, head_dim)     k or v of one head
    float *gate, *up;    // (batch * group_size)  some elements of W1 h and W3 h of all tokens;
                         // with experts, later one expert's output and the sum over all
    Quantized gathered;  // (batch, dim)          the xq of the tokens that chose the expert at hand
    void *panel;         // Part III only: what a product keeps while it runs (see panel_words)
    struct AttentionBuffers *attention;  // Part III only
} Workspace;

// Everything that changes while the model runs. A batch is consecutive tokens of one text that run
// through the model together: a long prompt is cut into batches.
typedef struct {
    int seq_len;         // positions that the cache has room for
    int batch;           // the maximum number of tokens in a batch
    int *pos;            // (batch)               each token's position
    float *cos, *sin;    // (batch, head_dim / 2) of the angles of rope at that position
    float *x;            // (batch, dim)          the residual stream
    Quantized xq;        // (batch, dim)          Q8(rmsnorm(x))
    float *q;            // (batch, q_dim)        the queries
    float *a;            // (batch, q_dim)        what attention finds for each query
    Quantized aq;        // (batch, q_dim)        Q8(a)
    Quantized hq;        // (batch, hidden_dim)   Q8(silu(W1 h) * (W3 h)); with experts
                         // (batch * n_experts_used, hidden_dim): see Routing
    struct Routing *routing;  // which experts run for which tokens; NULL: no mixture of experts
    float *logits;       // (logit_rows, vocab_size)
    int logit_rows;      // the maximum number of rows that one call of classify scores
    float *freq;         // (head_dim / 2)        radians per position: see rope_init
    float rope_scale;    // factor on cos and sin, 1 without YaRN
    float *cache;        // K and V of all layers and kv heads, in blocks of positions: see Part III
    Workspace *workspace;  // (threads)
    int passes;          // forward passes so far; only the tests read it
} State;

typedef struct {
    Config config;
    Weights weights;
    State state;
} Model;

typedef struct {     // a batch on its way through one layer
    Model *m;
    int l;           // the layer's number
    const Layer *w;  // and its weights
    int n;           // tokens in the batch
    int first;       // tokens first .. n - 1 are computed; k and v are made for all n. first is 0,
                     // except in the last layer, where it is n - needed (up to n): see forward
} Pass;

typedef struct {         // W[r] . x[t] for a range of rows r and of tokens t
    const Matrix *w;     // (rows, cols)
    const Quantized *x;  // (tokens, cols)
    float *out;          // the result's place: out[t * stride + r - row_begin]
    int stride;
    int row_begin, row_end, token_begin, token_end;
    bool add;            // out += instead of out =
} Matmul;

// Tokenizer, Char and Engine are defined below, Writer in Part II.
typedef struct Tokenizer Tokenizer;
typedef struct Engine Engine;
typedef struct Writer Writer;
typedef struct Char Char;

// ------------------------------------------------------------------------------------------------
// What Parts II and III provide. The results of Part III never depend on the number of threads or
// on how a text was cut into batches: sums of floats have one fixed order.

// Cuts 0 .. count - 1 into ranges that begin at multiples of `chunk`, and calls
// job(arg, begin, end, thread) for each, on all threads; `thread` is an index into
// State.workspace. Returns when all are done. Only the main thread calls it, never inside a job.
typedef void (*Job)(void *arg, int begin, int end, int thread);
static void parallel(Job job, void *arg, int count, int chunk);

// A product with a matrix: dot_row (below) of the given rows and tokens. matmul_rows works in the
// calling thread, inside a job; own is its workspace. matmul takes all rows, on all threads, and
// ignores row_begin and row_end.
static void matmul_rows(const Matmul *part, const Workspace *own);
static void matmul(const State *s, Matmul all);

// attend (below) for all query heads of tokens first .. n - 1, on all threads.
static void attend_all(const Pass *p);

// The KV cache of p's layer: stores a key or a value (head_dim) of one kv head at position pos; or
// reads element j of one.
static void cache_put_key(const Pass *p, int kv_head, int pos, const float *k);
static void cache_put_value(const Pass *p, int kv_head, int pos, const float *v);
static float cache_key(const Pass *p, int kv_head, int pos, int j);
static float cache_value(const Pass *p, int kv_head, int pos, int j);

// The progress display of a long text. progress_start: `tokens` tokens are about to run, from
// position `first` on. progress_add: n have finished one more layer. progress_end clears it.
static void progress_start(const Model *m, size_t first, size_t tokens);
static void progress_add(int n);
static void progress_end(void);

// The character at offset `at` of a text; at the text's end, 0 bytes of class END.
static Char char_at(const Tokenizer *tok, Bytes text, size_t at);

// Appends a text in Unicode's normalization form C (NFC).
static void normalize(const Tokenizer *tok, Buffer *out, Bytes text);

// The token with exactly these bytes, or -1. Added tokens, such as <|im_start|>, do not count.
static int token_find(const Tokenizer *tok, Bytes text);

// Writes a token's text. Returns false if -x TEXT ends the answer, before this text or within it.
static bool writer_token(Writer *out, const Tokenizer *tok, int id);

// Runs a drawn token through the model and appends it to Engine.cached. Returns the logits of the
// next token, or NULL after Ctrl-C. count: tokens of the answer so far, with this one. In
// principle, with pos = cached.n, this is
//   forward(m, &id, 1, pos, 1); return classify(m, 0, 1);
// Part II adds a kind of speculative decoding: where the text repeats itself, it guesses several
// tokens and checks the guesses in one pass. The results are the same. advance_start forgets the
// guesses of the last answer.
static float *advance(Engine *e, int id, int count);
static void advance_start(Engine *e);

// ------------------------------------------------------------------------------------------------
// Math: what a layer computes on one vector. Compilers vectorize these loops.

// a * b + c, fused (rounded once) exactly where Part III's mul_add_v is, so that both round alike
INLINE float mul_add(float a, float b, float c) {
#if (defined(__AVX2__) && defined(__FMA__)) || defined(__ARM_FEATURE_DOTPROD)
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
// is ROUNDER_BITS + x, with x rounded to the nearest integer (ties to even), also if x < 0.
#define ROUNDER 12582912.0f
enum { ROUNDER_BITS = 0x4B400000 };

// exp(x) = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2; e^r is a polynomial (Cephes expf).
// The error is at most 2 units in the last place, and exp(0) is exactly 1. For x < -87.7 the result
// is 0, as n = -127 makes the exponent's bits 0; for x > 88 it is exp(88). Loops over it vectorize.
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
    // The bits of `shifted` are ROUNDER_BITS + n. The shift by 23 drops ROUNDER_BITS and moves
    // n + 127 into the exponent's place, which gives the float 2^n.
    return p * as_float(((uint32_t)load_i32(&shifted) + 127) << 23);
}

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

// x from vector t on, as its vector 0. The stride is in units of 4 bytes, so q moves by 4 * at.
INLINE Quantized quantized_row(const Quantized *x, int t) {
    const size_t at = t * x->stride;
    return (Quantized){x->q + 4 * at, x->scale + at, x->bias_fix + at, x->stride};
}

// Quantizes x (n) into columns at .. at + n - 1 of row t of out. For each group:
// scale = max|x| / 127 and q = round(x * (127 / max|x|)). A group whose scale would be below the
// smallest normal number becomes zeros; one with an infinity or NaN makes every product NaN. (The
// bits of floats that are not negative have the order of the floats.)
static void quantize(const Quantized *out, int t, int at, const float *x, int n, int group) {
    const Quantized row = quantized_row(out, t);
    for (int g = at / group; g < (at + n) / group; g++, x += group) {
        int8_t *q = row.q + (size_t)g * group;
        int32_t max = 0;
        for (int i = 0; i < group; i++) max = max_int(max, load_i32(x + i) & INT32_MAX);  // of |x|
        const float largest = as_float(max);
        const bool zeros = largest < FLT_MIN * 127;
        const float inverse = zeros ? 0 : 127 / largest;
        uint32_t sum = 0;
        for (int i = 0; i < group; i++) {
            float shifted = x[i] * inverse + ROUNDER;
            uint32_t rounded = (uint32_t)load_i32(&shifted) - ROUNDER_BITS;
            q[i] = (int8_t)rounded;
            sum += rounded;
        }
        row.scale[g] = zeros ? 0 : largest / 127;
        row.bias_fix[g] = isfinite(largest) ? -128 * (int32_t)sum : 0;  // for Part III only
    }
}

// ------------------------------------------------------------------------------------------------
// One layer: one function for each step. Most of them run a job on all threads. The job's function
// stands right above its step; each call handles a range of tokens, heads or groups.

typedef struct {
    const Pass *p;
    const float *w;  // (dim) rms_att or rms_ffn
} Norm;

static void norm_job(void *arg, int begin, int end, int thread) {
    const Pass *p = ((const Norm *)arg)->p;
    const Config *c = &p->m->config;
    const State *s = &p->m->state;
    float *h = s->workspace[thread].h;
    for (int t = p->first + begin; t < p->first + end; t++) {
        rmsnorm(h, s->x + (size_t)t * c->dim, ((const Norm *)arg)->w, c->dim, c->rms_norm_eps);
        quantize(&s->xq, t, 0, h, c->dim, c->group_size);
    }
}

// xq = Q8(rmsnorm(x, w))
static void norm(const Pass *p, const float *w) {
    parallel(norm_job, &(Norm){p, w}, p->n - p->first, 4);  // in chunks of 4 tokens
}

// One head of W xq + bias, where W is Wq, Wk or Wv, for tokens begin .. n - 1. Token t's head_dim
// values go to out + t * stride.
static void project(const Pass *p, float *out, int stride, const Matrix *w, const float *bias,
                    int head, int begin, int thread) {
    const State *s = &p->m->state;
    const int head_dim = p->m->config.head_dim;
    matmul_rows(&(Matmul){.w = w, .x = &s->xq, .out = out, .stride = stride,
                          .row_begin = head * head_dim, .row_end = (head + 1) * head_dim,
                          .token_begin = begin, .token_end = p->n}, &s->workspace[thread]);
    for (int t = begin; bias && t < p->n; t++) {
        for (int j = 0; j < head_dim; j++) out[(size_t)t * stride + j] += bias[head * head_dim + j];
    }
}

// qk (head_dim), one head's q or k of token t, becomes rope(rmsnorm(qk)). norm_weight is NULL in
// models without QK-norm.
static void norm_and_rope(const Pass *p, float *qk, const float *norm_weight, int t) {
    const Config *c = &p->m->config;
    const State *s = &p->m->state;
    const int half = c->head_dim / 2;
    if (norm_weight) rmsnorm(qk, qk, norm_weight, c->head_dim, c->rms_norm_eps);
    rope(qk, s->cos + (size_t)t * half, s->sin + (size_t)t * half, half);
}

static void q_head(const Pass *p, int head, int thread) {
    const int q_dim = p->m->config.q_dim;
    float *q = p->m->state.q + head * p->m->config.head_dim;
    project(p, q, q_dim, &p->w->wq, p->w->bq, head, p->first, thread);
    for (int t = p->first; t < p->n; t++) norm_and_rope(p, q + (size_t)t * q_dim, p->w->q_norm, t);
}

// All n tokens, not only those from p->first on: later tokens read their k and v.
static void k_head(const Pass *p, int kv_head, int thread) {
    const State *s = &p->m->state;
    const int head_dim = p->m->config.head_dim;
    float *k = s->workspace[thread].kv;
    project(p, k, head_dim, &p->w->wk, p->w->bk, kv_head, 0, thread);
    for (int t = 0; t < p->n; t++, k += head_dim) {
        norm_and_rope(p, k, p->w->k_norm, t);
        cache_put_key(p, kv_head, s->pos[t], k);
    }
}

static void v_head(const Pass *p, int kv_head, int thread) {
    const State *s = &p->m->state;
    const int head_dim = p->m->config.head_dim;
    float *v = s->workspace[thread].kv;
    project(p, v, head_dim, &p->w->wv, p->w->bv, kv_head, 0, thread);
    for (int t = 0; t < p->n; t++, v += head_dim) cache_put_value(p, kv_head, s->pos[t], v);
}

// Heads begin .. end - 1 of q, then k, then v. One thread projects a head for all tokens and then
// finishes it, while it is in that core's caches.
static void qkv_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const int n_heads = p->m->config.n_heads, n_kv_heads = p->m->config.n_kv_heads;
    for (int i = begin; i < end; i++) {
        if (i < n_heads) q_head(p, i, thread);
        else if (i < n_heads + n_kv_heads) k_head(p, i - n_heads, thread);
        else v_head(p, i - n_heads - n_kv_heads, thread);
    }
}

// q = rope(rmsnorm(Wq xq)), k = rope(rmsnorm(Wk xq)), v = Wv xq; k and v go to the KV cache
static void qkv(const Pass *p) {
    parallel(qkv_job, (void *)p, p->m->config.n_heads + 2 * p->m->config.n_kv_heads, 1);
}

static void quantize_a_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const Config *c = &p->m->config;
    const State *s = &p->m->state;
    (void)thread;
    for (int t = p->first + begin; t < p->first + end; t++) {
        quantize(&s->aq, t, 0, s->a + (size_t)t * c->q_dim, c->q_dim, c->group_size);
    }
}

// aq = Q8(a), a = softmax(q . K / sqrt(head_dim)) V
static void attention(const Pass *p) {
    attend_all(p);
    parallel(quantize_a_job, (void *)p, p->n - p->first, 4);
}

// x = x + W y
static void matmul_add(const Pass *p, const Matrix *w, const Quantized *y) {
    const State *s = &p->m->state;
    matmul(s, (Matmul){.w = w, .x = y, .out = s->x, .stride = w->rows, .add = true,
                       .token_begin = p->first, .token_end = p->n});
}

typedef struct {   // what swiglu_groups works on
    Quantized in;  // (n, dim)  Q8(h) of n tokens; n can be 0
    int n;
    int hq_row;    // the result of token t of these goes to row hq_row + t of State.hq
    int w_row;     // the first row of W1 and W3 to use: 0, or the first one of an expert
} Swiglu;

// Computes groups begin .. end - 1 of n rows of hq. Column i of hq needs just one row of W1 and one
// of W3. The buffers gate and up are small, to stay in the CPU's caches: for n tokens they have
// room for batch / n groups, so each round computes at most that many.
static void swiglu_groups(const Pass *p, const Swiglu *a, int begin, int end, int thread) {
    const State *s = &p->m->state;
    const Workspace *own = &s->workspace[thread];
    const int group = p->m->config.group_size;
    for (int g = begin, count; g < end; g += count) {
        count = min_int(end - g, s->batch / max_int(a->n, 1));
        const int cols = count * group, row = a->w_row + g * group;
        Matmul part = {.w = &p->w->w1, .x = &a->in, .out = own->gate, .stride = cols,
                       .row_begin = row, .row_end = row + cols, .token_end = a->n};
        matmul_rows(&part, own);
        part.w = &p->w->w3;
        part.out = own->up;
        matmul_rows(&part, own);
        for (int t = 0; t < a->n; t++) {
            float *gate = own->gate + (size_t)t * cols;
            silu_times(gate, own->up + (size_t)t * cols, cols);
            quantize(&s->hq, a->hq_row + t, g * group, gate, cols, group);
        }
    }
}

static void swiglu_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const Swiglu all = {.in = quantized_row(&p->m->state.xq, p->first), .n = p->n - p->first,
                        .hq_row = p->first};
    swiglu_groups(p, &all, begin, end, thread);
}

// hq = Q8(silu(W1 xq) * (W3 xq))
static void swiglu(const Pass *p) {
    parallel(swiglu_job, (void *)p, p->m->config.hidden_dim / p->m->config.group_size, 1);
}

// ------------------------------------------------------------------------------------------------
// The whole model: the layers one after the other, then the scores

// Prepares row t of a batch: x, the token's row of the embedding table; its position; and the cos
// and sin of its rope angles.
static void embed(Model *m, int t, int token, int pos) {
    const Matrix *table = &m->weights.embedding;
    State *s = &m->state;
    const int dim = table->cols, half = m->config.head_dim / 2;
    const int8_t *q = table->q + (size_t)token * dim;  // 8 bits always
    const float *scale = table->scale + (size_t)token * (dim / table->group);
    for (int i = 0; i < dim; i++) s->x[(size_t)t * dim + i] = q[i] * scale[i / table->group];
    for (int j = 0; j < half; j++) {
        float angle = (float)pos * s->freq[j];
        s->cos[(size_t)t * half + j] = cosf(angle) * s->rope_scale;
        s->sin[(size_t)t * half + j] = sinf(angle) * s->rope_scale;
    }
    s->pos[t] = pos;
}

static void experts(const Pass *p);  // see A mixture of experts

// Runs n <= batch tokens at positions pos .. pos + n - 1. The cache must hold the positions before
// them, and afterwards holds these as well. Then the last `needed` rows of x (n, dim) are the last
// layer's output. A prompt's batches before the last one need 0. Returns false after Ctrl-C.
static bool forward(Model *m, const int *tokens, int n, int pos, int needed) {
    State *s = &m->state;
    const int n_layers = m->config.n_layers;
    Pass p = {.m = m, .n = n};
    s->passes++;
    for (int t = 0; t < n; t++) embed(m, t, tokens[t], pos + t);

    for (p.l = 0; p.l < n_layers; p.l++) {
        if (interrupted) return false;
        p.w = &m->weights.layers[p.l];
        norm(&p, p.w->rms_att);            // xq = Q8(rmsnorm(x))
        // Other tokens read a token only through its k and v. So in the last layer all tokens store
        // these, but everything else runs only for those whose output is needed.
        if (p.l == n_layers - 1) p.first = n - needed;
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

// Computes logits (count, vocab_size) = Wcls Q8(rmsnorm(x, rms_final)) for rows first ..
// first + count - 1 of x; count is at most logit_rows. Overwrites xq.
static float *classify(Model *m, int first, int count) {
    const Config *c = &m->config;
    State *s = &m->state;
    float *h = s->workspace[0].h;
    for (int t = 0; t < count; t++) {
        const float *x = s->x + (size_t)(first + t) * c->dim;
        rmsnorm(h, x, m->weights.rms_final, c->dim, c->rms_norm_eps);
        quantize(&s->xq, t, 0, h, c->dim, c->group_size);
    }
    matmul(s, (Matmul){.w = &m->weights.classifier, .x = &s->xq, .out = s->logits,
                       .stride = c->vocab_size, .token_end = count});
    return s->logits;
}

// YaRN (arXiv 2309.00071; HF modeling_rope_utils) lets a model read longer texts than the L =
// yarn_original_len tokens of its training. Pairs that rotate fast keep their frequency, slow ones
// have it divided by yarn_factor, and those in between get a mixture. Returns the share of the
// divided frequency: 0 for pairs that turn more than beta_fast times within L, 1 for those that
// turn less than beta_slow times, in between linear in j. Within L, pair j turns beta times if
//   j = d * ln(L / (2 pi beta)) / (2 ln theta)    with d = head_dim
static float yarn_ramp(const Config *c, int j) {
    const float d = c->head_dim, turns = c->yarn_original_len / 6.28318531f;
    float low = d * logf(turns / c->yarn_beta_fast) / (2 * logf(c->rope_theta));
    float high = d * logf(turns / c->yarn_beta_slow) / (2 * logf(c->rope_theta));
    if (!c->yarn_no_rounding) low = floorf(low), high = ceilf(high);
    low = fmaxf(low, 0);
    high = fminf(high, d - 1);  // as in HF, although j is less than d / 2
    if (low == high) high += 0.001f;
    return fminf(fmaxf((j - low) / (high - low), 0), 1);
}

// freq[j] = theta^(-2j / head_dim) radians per position, changed by YaRN if the model uses it. YaRN
// also makes the scores q . k larger: q and k get its attention_factor by way of cos and sin.
static void rope_init(State *s, const Config *c) {
    for (int j = 0; j < c->head_dim / 2; j++) {
        const float freq = 1 / powf(c->rope_theta, 2 * j / (float)c->head_dim);
        const float ramp = c->rope_scaling ? yarn_ramp(c, j) : 0;
        s->freq[j] = ramp == 0 ? freq : freq / c->yarn_factor * ramp + freq * (1 - ramp);
    }
    s->rope_scale = c->rope_scaling ? c->yarn_attention_factor : 1;
}

// ------------------------------------------------------------------------------------------------
// Matrix product and attention, in plain C. They define what Part III computes: it keeps the order
// of each sum, so its results are the same bit for bit (those of attention for texts of up to 256
// positions: see SPAN), and it is faster because it works on several sums at once. Builds without
// SIMD run dot_row itself; attend runs in tests and `make journey` only.

// A float of 16 bits (IEEE 754 half precision: 1 bit of sign, 5 of exponent, 10 of fraction).
// Shifted left by 13, exponent and fraction stand where a float has them. But an exponent e means
// 2^(e - 15), and there it is read as 2^(e - 127): hence the factor 2^112. The highest exponent, of
// infinity and NaN, becomes a float's highest.
INLINE float half_float(uint16_t half) {
    const uint32_t bits = (half & 0x7FFFu) << 13, sign = (half & 0x8000u) << 16;
    const float value = as_float(bits) * 0x1p112f;
    return as_float((uint32_t)load_i32(&value) | sign | (bits >= 0x0F800000 ? 0x7F800000 : 0));
}

// The int8 of weight (r, i). With 4 bits, a group takes group / 2 bytes. Byte b holds two indices
// into levels: in its low nibble that of the group's weight b, in its high one that of weight b +
// group / 2. group equals w->group; callers pass it as a constant, so that the compiler can unroll.
INLINE int weight_q(const Matrix *w, int r, int i, const int group) {
    const size_t at = (size_t)r * w->cols + i;
    if (w->bits != 4) return w->q[at];
    const int j = i % group, half = group / 2;                 // j: the place in the group
    const uint8_t pair = w->nibbles[(at - j) / 2 + j % half];  // (at - j) / 2: its first byte
    return w->levels[j < half ? pair & 15 : pair >> 4];
}

INLINE float weight_scale(const Matrix *w, int r, int g, const int group) {
    const size_t at = (size_t)r * (w->cols / group) + g;
    return w->bits != 4 ? w->scale[at] : half_float(w->half_scale[at]);
}

// W[r] . x[t]: see Matmul. The products of a group add up to an exact integer; the groups are
// added as floats, from the first to the last.
INLINE float dot_row(const Matrix *w, int r, const Quantized *x, int t, const int group) {
    const Quantized x_row = quantized_row(x, t);
    float sum = 0;
    for (int g = 0; g < w->cols / group; g++) {
        int32_t dot = 0;
        for (int i = g * group; i < (g + 1) * group; i++) {
            dot += weight_q(w, r, i, group) * x_row.q[i];
        }
        sum = mul_add((float)dot * weight_scale(w, r, g, group), x_row.scale[g], sum);
    }
    return sum;
}

// Returns the largest of x (n > 0). It compares the bits of the floats as ints, because compilers
// vectorize that. Nonnegative floats have the same order as their bits. For negative floats the
// order is reversed, so all their bits but the sign are flipped.
static float max_of(const float *x, int n) {
    int32_t max = INT32_MIN;
    for (int i = 0; i < n; i++) {
        int32_t bits = load_i32(x + i);
        bits ^= bits >> 31 & 0x7FFFFFFF;
        max = bits > max ? bits : max;
    }
    return as_float(max ^ (max >> 31 & 0x7FFFFFFF));
}

// Replaces x (n) by exp(x - max), where max is max_of(x, n), and returns the sum; dividing by it
// completes the softmax: exp(max) cancels, and without it exp(x) could be infinite.
static float softmax_terms(float *x, int n, float max) {
    for (int i = 0; i < n; i++) x[i] = fast_exp(x[i] - max);
    return sum_of(x, n, false);
}

// Attention of one query head of token t: a = softmax(q . K / sqrt(head_dim)) V with q and a
// (head_dim), K and V (len, head_dim). score (seq_len) is overwritten.
INLINE void attend(const Pass *p, int t, int head, float *score) {
    const Config *c = &p->m->config;
    const State *s = &p->m->state;
    const int kv_head = head / (c->n_heads / c->n_kv_heads);
    const int len = s->pos[t] + 1;  // causal: a token sees itself and those before it
    const float *q = s->q + (size_t)t * c->q_dim + head * c->head_dim;
    float *a = s->a + (size_t)t * c->q_dim + head * c->head_dim;
    for (int i = 0; i < len; i++) {
        float dot = 0;
        for (int j = 0; j < c->head_dim; j++) dot = mul_add(cache_key(p, kv_head, i, j), q[j], dot);
        score[i] = dot * (1 / sqrtf((float)c->head_dim));
    }
    const float total = softmax_terms(score, len, max_of(score, len));
    for (int j = 0; j < c->head_dim; j++) {
        float sum = 0;
        for (int i = 0; i < len; i++) sum = mul_add(cache_value(p, kv_head, i, j), score[i], sum);
        a[j] = sum * (1 / total);
    }
}

// ------------------------------------------------------------------------------------------------
// A mixture of experts (HF Qwen3MoeSparseMoeBlock). The tokens of a batch choose different experts.
// An expert runs for all tokens that chose it together, so that its weights are read once.

typedef struct Routing {
    float *h;      // (batch, dim)        rmsnorm(x); the router is not quantized
    float *share;  // (batch, n_experts)  first Wr h; then p of the chosen experts, 0 for the others
    int n_active;  // how many experts were chosen by at least one token of the batch
    int *expert;   // (n_experts)         expert[0 .. n_active - 1] are these, ascending
    int *token;    // (batch * n_experts_used)  the tokens of expert[0], then those of expert[1],
                   // and so on. Row i of State.hq belongs to token[i].
    int *place;    // (n_experts + 1)     expert[k] has token[place[k]] .. token[place[k + 1] - 1]
} Routing;

// a . b, both (n), n a multiple of 16; in the order of sum_of
INLINE float dot_floats(const float *a, const float *b, int n) {
    float sums[16] = {0};
    for (int i = 0; i < n; i += 16) {
        for (int j = 0; j < 16; j++) sums[j] = mul_add(a[i + j], b[i + j], sums[j]);
    }
    return sum_of(sums, 16, false);
}

// The router's h. norm() made it, too, but kept only Q8 of it.
static void router_norm_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const Config *c = &p->m->config;
    const State *s = &p->m->state;
    (void)thread;
    for (int t = p->first + begin; t < p->first + end; t++) {
        const size_t at = (size_t)t * c->dim;
        rmsnorm(s->routing->h + at, s->x + at, p->w->rms_ffn, c->dim, c->rms_norm_eps);
    }
}

// share[t][e] = Wr[e] . h[t] for experts begin .. end - 1 and all tokens
static void router_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const Config *c = &p->m->config;
    const Routing *r = p->m->state.routing;
    (void)thread;
    for (int t = p->first; t < p->n; t++) {
        for (int e = begin; e < end; e++) {
            r->share[(size_t)t * c->n_experts + e] =
                dot_floats(p->w->router + (size_t)e * c->dim, r->h + (size_t)t * c->dim, c->dim);
        }
    }
}

// share (n_experts), Wr h of one token, becomes p of the n_experts_used experts with the largest p
// (of equal ones the first) and 0 of all others.
static void choose_experts(const Config *c, float *share) {
    const float all = softmax_terms(share, c->n_experts, max_of(share, c->n_experts));
    float chosen = 0;
    for (int i = 0; i < c->n_experts_used; i++) {
        int best = 0;
        for (int e = 1; e < c->n_experts; e++) best = share[e] > share[best] ? e : best;
        chosen += share[best];
        share[best] = -share[best];  // chosen. A p that is 0 stays 0: it would add nothing
    }
    const float divisor = c->no_topk_norm ? all : chosen;
    for (int e = 0; e < c->n_experts; e++) share[e] = share[e] < 0 ? -share[e] / divisor : 0;
    if (isnan(all)) share[0] = NAN;  // reaches the logits, and the run ends
}

static void choose_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const Config *c = &p->m->config;
    (void)thread;
    for (int t = p->first + begin; t < p->first + end; t++) {
        choose_experts(c, p->m->state.routing->share + (size_t)t * c->n_experts);
    }
}

// share = p[e] for e in S, else 0; then lists the tokens of each expert.
static void route(const Pass *p) {
    const Config *c = &p->m->config;
    Routing *r = p->m->state.routing;
    parallel(router_norm_job, (void *)p, p->n - p->first, 4);
    parallel(router_job, (void *)p, c->n_experts, 8);
    parallel(choose_job, (void *)p, p->n - p->first, 4);
    r->n_active = r->place[0] = 0;
    for (int e = 0, n = 0; e < c->n_experts; e++) {
        for (int t = p->first; t < p->n; t++) {
            if (r->share[(size_t)t * c->n_experts + e] != 0) r->token[n++] = t;
        }
        if (n == r->place[r->n_active]) continue;  // nobody chose e
        r->expert[r->n_active++] = e;
        r->place[r->n_active] = n;
    }
}

// Each active expert has n_groups groups of hq: begin .. end - 1 counts those of expert[0], then
// those of expert[1], and so on.
static void experts_hidden_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const Config *c = &p->m->config;
    const State *s = &p->m->state;
    const Routing *r = s->routing;
    const Quantized gathered = s->workspace[thread].gathered;
    const int n_groups = c->hidden_dim / c->group_size;
    for (int i = begin, next; i < end; i = next) {
        const int k = i / n_groups, place = r->place[k], n = r->place[k + 1] - place;
        next = min_int(end, (k + 1) * n_groups);
        for (int j = 0; j < n; j++) {  // whole blocks: q, scale and bias_fix
            memcpy(quantized_row(&gathered, j).q, quantized_row(&s->xq, r->token[place + j]).q,
                   gathered.stride * 4);
        }
        const Swiglu part = {.in = gathered, .n = n, .hq_row = place,
                             .w_row = r->expert[k] * c->hidden_dim};
        swiglu_groups(p, &part, i - k * n_groups, next - k * n_groups, thread);
    }
}

// For each token that chose expert e = expert[k], computes elements begin .. begin + count - 1 of
// W2[e] hq and adds them, times p[e], to the token's row of sum (tokens first .. n - 1, count).
static void add_expert(const Pass *p, int k, int begin, int count, float *sum, int thread) {
    const Config *c = &p->m->config;
    const State *s = &p->m->state;
    const Routing *r = s->routing;
    const Workspace *own = &s->workspace[thread];
    const int e = r->expert[k], n = r->place[k + 1] - r->place[k], row = e * c->dim + begin;
    const Quantized hq = quantized_row(&s->hq, r->place[k]);
    float *out = own->gate;
    matmul_rows(&(Matmul){.w = &p->w->w2, .x = &hq, .out = out, .stride = count, .row_begin = row,
                          .row_end = row + count, .token_end = n}, own);
    for (int j = 0; j < n; j++, out += count) {
        const int t = r->token[r->place[k] + j];
        const float share = r->share[(size_t)t * c->n_experts + e];
        float *y = sum + (size_t)(t - p->first) * count;
        for (int i = 0; i < count; i++) y[i] += share * out[i];
    }
}

// Adds the experts' outputs to groups begin .. end - 1 of each token's x. One call adds all experts
// to an element, in ascending order, so that the result does not depend on the threads.
static void experts_output_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const Config *c = &p->m->config;
    const State *s = &p->m->state;
    const int n = p->n - p->first;
    for (int g = begin, groups; g < end; g += groups) {
        groups = min_int(end - g, s->batch / max_int(n, 1));  // as in swiglu_groups
        const int count = groups * c->group_size, at = g * c->group_size;
        float *sum = s->workspace[thread].up;
        memset(sum, 0, (size_t)n * count * sizeof(float));
        for (int k = 0; k < s->routing->n_active; k++) add_expert(p, k, at, count, sum, thread);
        for (int t = p->first; t < p->n; t++, sum += count) {
            float *x = s->x + (size_t)t * c->dim + at;
            for (int i = 0; i < count; i++) x[i] += sum[i];
        }
    }
}

// x = x + sum of p[e] W2[e] Q8(silu(W1[e] xq) * (W3[e] xq)) over the chosen experts e
static void experts(const Pass *p) {
    const Config *c = &p->m->config;
    route(p);
    parallel(experts_hidden_job, (void *)p,
             p->m->state.routing->n_active * (c->hidden_dim / c->group_size), 1);
    parallel(experts_output_job, (void *)p, c->dim / c->group_size, 1);
}

// ------------------------------------------------------------------------------------------------
// Texts: byte strings and lists of tokens, and how they grow

// Returns p, reallocated if it has no room for `more` elements of `size` bytes after the first n.
static void *grow(void *p, size_t *cap, size_t n, size_t more, size_t size) {
    if (n + more <= *cap) return p;
    *cap = n + more > 2 * *cap ? n + more : 2 * *cap;
    p = realloc(p, *cap * size);
    if (!p) die("memory: not enough for text, expected %.0f MB", *cap * (double)size / 1e6);
    return p;
}

static void buffer_add(Buffer *b, Bytes text) {
    b->p = grow(b->p, &b->cap, b->n, text.n + 1, 1);  // + 1: p is not NULL after an empty text
    if (text.n) memcpy(b->p + b->n, text.p, text.n);
    b->n += text.n;
}

static void ids_add(Ids *ids, int id) {
    ids->p = grow(ids->p, &ids->cap, ids->n, 1, sizeof(int));
    ids->p[ids->n++] = id;
}

static Bytes bytes(const char *s) { return (Bytes){(const uint8_t *)s, strlen(s)}; }
static Bytes bytes_of(const Buffer *b) { return (Bytes){b->p, b->n}; }

static bool bytes_equal(Bytes a, Bytes b) {
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

static Bytes bytes_from(Bytes b, size_t start) {  // b.p may be NULL if `start` is 0
    return (Bytes){start ? b.p + start : b.p, b.n - start};
}

// ------------------------------------------------------------------------------------------------
// Text to tokens. The text is cut at added tokens (such as <|im_start|>), normalized (NFC), and cut
// into pieces, mostly words, by a regular expression. Then byte-pair encoding: each byte of a piece
// begins as a token of its own; as long as two neighbours together are a token of the vocabulary,
// the pair whose token has the highest score is merged: l o w e r -> lo w e r -> lo w er -> low er
// -> lower. (This score is the merge's priority, from the tokenizer file. It is not one of the
// model's scores.)

enum { OTHER, LETTER, NUMBER, SPACE, END };  // classes of characters; END: after the text
enum {           // bits of Tokenizer.kind
    ADDED = 1,   // an added token, such as <|im_start|>: found before the text is cut into pieces
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
    Bytes answer[2];   // where the model's answer begins: thinking off, thinking on
    Bytes strip;       // </think>: everything up to the last one is cut from an earlier answer
    Bytes trim;        // and then any of these characters from the start of the rest
} ChatFormat;

struct Tokenizer {
    int vocab_size;
    Bytes *text;             // (vocab_size)
    float *score;            // (vocab_size) of the merge that makes the token: higher ones first
    uint8_t *kind;           // (vocab_size) ADDED, SPECIAL
    int byte_token[256];
    uint32_t *table;         // (mask + 1) hash table of the ordinary tokens: id + 1, or 0 if free
    uint32_t mask;
    uint64_t seed[2];        // of the hash, odd: nobody can make a file whose tokens share slots
    Ids added;               // the added tokens
    bool added_start[256];   // the bytes that added tokens begin with
    int end_of_text;         // <|endoftext|>
    int think, end_think;    // <think> and </think>, or -1
    Ids head, tail;          // put before and after every raw text
    Ids stop;                // each ends an answer
    float temperature, top_p, repetition;  // the checkpoint's advice: see Sampler
    int top_k;
    Mode mode;               // what the model is made for
    ChatFormat chat;
    bool has_chat;           // the file has a chat format
    bool has_classes;        // the file has the classes of characters
    uint16_t *chars;         // Part II only, as are the next: (N_CHARS) what each character is
    Mapping *decomposed;     // (n_decomposed) canonical decompositions: c to first << 32 | second
    Mapping *composed;       // (n_composed) and back, for those that NFC composes again
    size_t n_decomposed, n_composed;
};

struct Char {     // one character of a text
    uint32_t c;   // code point; a byte that is not valid UTF-8 gets a number above all of them
    int n;        // its bytes; 0 after the text
    int class;    // OTHER, LETTER, NUMBER, SPACE or END
    bool active;  // normalization may change it: see normalize
};

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

// A symbol is one token of a piece while it merges. Symbols are a doubly linked list, and each is
// known by the offset of its first byte. The one after the piece's end is a sentinel: it never
// merges, and it ends the list in both directions.
typedef struct {
    uint64_t key;         // priority of its merge with the next symbol, smallest first:
                          // rank_of(score) << 32 | offset, or NO_MERGE
    int id, merged;       // its token, and the token of that merge
    uint32_t prev, next;  // offsets of its neighbours
} Symbol;

static const uint64_t NO_MERGE = UINT64_MAX;

typedef struct {      // text arrives in parts, some of which may hold added tokens
    const Tokenizer *tok;
    Ids *out;
    Buffer plain;     // the text since the last added token, not encoded yet
    Buffer normal;    // its NFC
    Symbol *symbols;  // of one piece
    uint64_t *heap;   // keys of merges, a binary heap: the smallest is heap[0]
    size_t symbols_cap, n_heap, heap_cap;
} Encoder;

static void heap_push(Encoder *enc, uint64_t key) {
    enc->heap = grow(enc->heap, &enc->heap_cap, enc->n_heap, 1, sizeof(*enc->heap));
    size_t i = enc->n_heap++;
    for (size_t parent; i > 0 && key < enc->heap[parent = (i - 1) / 2]; i = parent) {
        enc->heap[i] = enc->heap[parent];
    }
    enc->heap[i] = key;
}

static uint64_t heap_pop(Encoder *enc) {
    uint64_t top = enc->heap[0], moved = enc->heap[--enc->n_heap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < enc->n_heap; i = child) {
        if (child + 1 < enc->n_heap && enc->heap[child + 1] < enc->heap[child]) child++;
        if (moved <= enc->heap[child]) break;
        enc->heap[i] = enc->heap[child];
    }
    enc->heap[i] = moved;
    return top;
}

// A higher score is a smaller rank. The bits of a negative float, as unsigned, grow as it falls and
// are all above INT_MAX; those of a nonnegative one grow as it rises, so they are reversed.
INLINE uint32_t rank_of(float score) {
    float value = score + 0.0f;  // -0 becomes 0
    uint32_t bits = load_i32(&value);
    return bits >> 31 ? bits : INT_MAX - bits;
}

// Looks up whether the symbol at `at` and the next one make a token: that is their merge.
static void find_merge(Encoder *enc, Bytes piece, uint32_t at) {
    Symbol *symbol = &enc->symbols[at];
    symbol->key = NO_MERGE;
    if (symbol->next >= piece.n) return;
    const Tokenizer *tok = enc->tok;
    const uint32_t end = enc->symbols[symbol->next].next;
    symbol->merged = token_find(tok, (Bytes){piece.p + at, end - at});
    if (symbol->merged >= 0) symbol->key = (uint64_t)rank_of(tok->score[symbol->merged]) << 32 | at;
}

// A merge is pushed only if it is a local minimum, that is, if its key is smaller than those of
// both neighbours. The smallest key of all is always a local minimum, so nothing is missed; and the
// heap stays small: in a long run of one letter only the first merge is a minimum, and the run
// takes linear time.
static void offer(Encoder *enc, uint32_t at) {
    const Symbol *symbol = &enc->symbols[at];
    const uint64_t before = enc->symbols[symbol->prev].key, after = enc->symbols[symbol->next].key;
    if (symbol->key < before && symbol->key < after) heap_push(enc, symbol->key);
}

// Byte-pair encoding of one piece: always the merge with the highest score, the leftmost of equals.
static void encode_piece(Encoder *enc, Bytes piece) {
    const uint32_t end = (uint32_t)piece.n;
    enc->symbols = grow(enc->symbols, &enc->symbols_cap, 0, piece.n + 1, sizeof(Symbol));
    for (uint32_t i = 0; i < end; i++) {
        enc->symbols[i] = (Symbol){.key = NO_MERGE, .id = enc->tok->byte_token[piece.p[i]],
                                 .prev = i ? i - 1 : end, .next = i + 1};
    }
    enc->symbols[end] = (Symbol){.key = NO_MERGE, .prev = end, .next = end};
    for (uint32_t i = 0; i < end && !interrupted; i++) find_merge(enc, piece, i);
    for (uint32_t i = 0; i < end && !interrupted; i++) offer(enc, i);
    while (enc->n_heap && !interrupted) {  // after Ctrl-C, no piece follows
        uint64_t key = heap_pop(enc);
        uint32_t at = (uint32_t)key;
        Symbol *left = &enc->symbols[at], *right = &enc->symbols[left->next];
        // Out of date: one of the two symbols has merged since. (A key can be in the heap twice.)
        if (left->key != key) continue;
        right->key = NO_MERGE;
        left->id = left->merged;
        left->next = right->next;
        enc->symbols[left->next].prev = at;
        find_merge(enc, piece, at);
        find_merge(enc, piece, left->prev);
        // These two keys are new, so they and their neighbours may be minima now.
        offer(enc, enc->symbols[left->prev].prev);
        offer(enc, left->prev);
        offer(enc, at);
        offer(enc, left->next);
    }
    for (uint32_t i = 0; i < end; i = enc->symbols[i].next) ids_add(enc->out, enc->symbols[i].id);
}

// Encodes the plain text that has arrived.
static void encode_flush(Encoder *enc) {
    Bytes text = bytes_of(&enc->plain);
    if (text.n >= INT_MAX) die("text: too long, expected less than 2 GB");
    if (enc->tok->n_decomposed) {  // the file has the data for NFC
        enc->normal.n = 0;
        normalize(enc->tok, &enc->normal, text);
        text = bytes_of(&enc->normal);
    }
    while (text.n && !interrupted) {  // the forward pass sees that, too
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
    for (; *at < text.n; ++*at) {
        int best = -1;
        for (size_t i = 0; tok->added_start[text.p[*at]] && i < tok->added.n; i++) {
            Bytes a = tok->text[tok->added.p[i]];
            bool there = a.n <= text.n - *at && memcmp(a.p, text.p + *at, a.n) == 0;
            if (there && (best < 0 || a.n > tok->text[best].n)) best = tok->added.p[i];
        }
        if (best >= 0) return best;
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
    free(enc->heap);
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
// The chat format. A conversation is a list of messages. The prompt of each turn is all of them, as
// the checkpoint's chat template renders them, for example
//   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n...
// export.py, which makes model.bin and its tokenizer file from a checkpoint, has turned the
// template into a ChatFormat. Each turn encodes the whole conversation anew; prefill then skips
// what the cache holds already.

typedef struct {
    int role;     // SYSTEM, USER or ASSISTANT
    Ids ids;      // of an answer: the tokens that the model drew
    Buffer text;  // of a system or user message; of an answer, what -x left of its last token
    size_t start; // tokens encoded before it: about where it begins in the rendering
} Message;

typedef struct {
    Message *p;
    size_t n, cap;
} Conversation;

// ChatML, which all Qwen models speak: for files without a chat format. Some models write <think>
// ... </think> before the answer; where the vocabulary has these tokens, an empty block turns
// thinking off.
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
    encode_plain(enc, bytes_of(&message->text));
    free(all.p);
}

// The ids of a conversation, up to where the model's answer begins
static void render(const Tokenizer *tok, Conversation *conversation, bool think, Ids *out) {
    const ChatFormat *f = &tok->chat;
    Encoder enc = {.tok = tok, .out = out};
    out->n = 0;
    encode_marked(&enc, f->start);
    if (conversation->n == 0 || conversation->p[0].role != SYSTEM)
        encode_marked(&enc, f->no_system);
    for (size_t i = 0; i < conversation->n; i++) {
        Message *message = &conversation->p[i];
        message->start = out->n;
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
// HF's order. Tokens are ordered by probability, equal ones by id. Nothing is sorted: each step is
// a loop over the whole vocabulary that compilers vectorize, so the time hardly depends on the
// distribution.

typedef struct {
    float temperature;  // 0: always the most likely token
    float top_p;        // keep the smallest set of tokens that reaches this probability
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

#define NOT_FINITE "model: the logits are not finite; is the file damaged?"

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

// Draws the next token by its logits (n), which are overwritten. Nucleus sampling (top_p must be >
// 0) needs no sorting. Let the total be the sum of all p before the first draw. Draw a token. If
// the tokens likelier than it sum to less than top_p * total, it is in the nucleus: return it. Else
// discard it and all less likely tokens, and draw again. No token of the nucleus is discarded
// before the draw that counts, so their proportions stay right.
static int sample(Sampler *sampler, float *logits, int n) {
    penalize(sampler, logits, n);
    if (!isfinite(sum_double(logits, n))) die(NOT_FINITE);
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

// ------------------------------------------------------------------------------------------------
// Generation: one loop for chat and for raw text

typedef enum { TURN_ENDED, LIMIT_REACHED, CONTEXT_ENDED, INTERRUPTED } Ending;

struct Engine {
    Model model;
    Tokenizer tokenizer;
    Sampler sampler;
    Writer *writer;   // where the answer goes
    int max_new;      // the maximum number of tokens in an answer, -1: no limit
    Ids cached;       // the tokens whose keys and values are in the cache. Allocated once, with
                      // room for seq_len + 1 ids (the one more is for advance)
    size_t reused;    // how many of the prompt's tokens were there already
    struct {          // Part II only: see advance
        int n, row;   // drafted tokens in the last forward pass; the row whose logits are in use
        int credit;   // what drafts may still cost
    } draft;
};

// Runs a prompt of 1 .. seq_len tokens through the model, except for the beginning that the cache
// holds already; its last token always runs, as that makes the first logits. Returns the last
// token's row in the last batch, or -1 after Ctrl-C.
static int prefill(Engine *e, const Ids *prompt) {
    Ids *cached = &e->cached;
    size_t same = 0;
    int n = 0;
    while (same < cached->n && same + 1 < prompt->n && cached->p[same] == prompt->p[same]) same++;
    e->reused = cached->n = same;
    // All ids are copied at once, but they count as cached only when their batch has run.
    memcpy(cached->p, prompt->p, prompt->n * sizeof(int));
    progress_start(&e->model, same, prompt->n - same);
    bool running = true;
    while (running && cached->n < prompt->n) {
        n = min_int(e->model.state.batch, (int)(prompt->n - cached->n));
        const bool last = cached->n + n == prompt->n;
        running = forward(&e->model, prompt->p + cached->n, n, (int)cached->n, last ? 1 : 0);
        if (running) cached->n += n;
    }
    progress_end();
    return running ? n - 1 : -1;
}

static bool is_stop(const Tokenizer *tok, int id) {
    for (size_t i = 0; i < tok->stop.n; i++) {
        if (tok->stop.p[i] == id) return true;
    }
    return false;
}

// Writes the continuation of a prompt that the cache holds, and adds its tokens to `answer`, which
// is empty. row: what prefill returned
static Ending generate(Engine *e, int row, Ids *answer) {
    const Tokenizer *tok = &e->tokenizer;
    Sampler *sampler = &e->sampler;
    memset(sampler->answered, 0, tok->vocab_size * sizeof(bool));
    memset(sampler->seen, 0, tok->vocab_size * sizeof(bool));
    for (size_t i = 0; i < e->cached.n; i++) sampler->seen[e->cached.p[i]] = true;
    advance_start(e);

    float *logits = classify(&e->model, row, 1);
    while (answer->n != (size_t)e->max_new) {  // false only if max_new is 0; -1 is never equal
        if (interrupted) return INTERRUPTED;
        int id = sample(sampler, logits, tok->vocab_size);
        if (is_stop(tok, id)) return TURN_ENDED;
        ids_add(answer, id);
        sampler->answered[id] = sampler->seen[id] = true;
        if (!writer_token(e->writer, tok, id)) return TURN_ENDED;
        if (answer->n == (size_t)e->max_new) break;  // the last token need not run
        if (e->cached.n == (size_t)e->model.state.seq_len) return CONTEXT_ENDED;
        logits = advance(e, id, (int)answer->n);
        if (!logits) return INTERRUPTED;
    }
    return LIMIT_REACHED;
}

// ================================================================================================
// PART II. THE PROGRAM
// ================================================================================================

#include <ctype.h>
#include <errno.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

// What Part III provides to Part II, on POSIX and Windows
static void start_platform(int *argc, char ***argv);  // Windows: UTF-8 and bytes everywhere
static void catch_signals(void);
static void start_threads(int count);
static int cpu_count(void);                           // how many threads to start without -j
static const char *simd_name(void);                   // the instruction set in use
static double now(void);                              // seconds since some fixed point
static bool is_terminal(int fd);
typedef enum { NO_FILE, REGULAR_FILE, DIRECTORY, SPECIAL_FILE } FileKind;
static FileKind file_kind(const char *path);
static Bytes file_map(const char *path);              // the whole file, mapped read-only
static const char *file_read(Buffer *b, const char *path);  // the whole file, added to b; -: stdin;
                                                      // returns NULL, or what went wrong
static void write_stdout(Bytes text);                 // all of it, whatever signals come
static ssize_t read_some(int fd, void *p, size_t n);  // read(), but waits also if fd is nonblocking
static int terminal_line(void);                       // the most bytes of a line that is typed
typedef enum { NOTHING, PART, LINE } Waiting;
static Waiting input_waits(void);                     // how much of a paste is still to be read

// Allocates all for seq_len positions, passes of at most `batch` tokens, and logit_rows rows
// of logits at once
static void state_init(Model *m, int seq_len, int batch, int logit_rows);

// How many tokens run through the model in about the time of one; 1 where a batch gains nothing
static int draft_rows(void);

// Set by run(), read by the signal handler: from now on the first Ctrl-C stops the answer, and not
// the program.
static volatile sig_atomic_t stoppable;

// ------------------------------------------------------------------------------------------------
// The model file, model.bin: a 256-byte header, then the weights, all little-endian. It is the
// format of the older qwen3.c (github.com/adriancable/qwen3.c), whose files still load.
//
//   offset  type  field               offset  type  field
//   0x00    u32   magic 0x616A6331    0x18    i32   n_kv_heads
//   0x04    i32   version 1           0x1C    i32   vocab_size
//   0x08    i32   dim                 0x20    i32   max_seq_len
//   0x0C    i32   hidden_dim          0x24    i32   head_dim
//   0x10    i32   n_layers            0x28    i32   shared_classifier, 0 or 1
//   0x14    i32   n_heads             0x2C    i32   group_size, 32, 64, 128 or 256
//
// In base files the rest of the 256 bytes is zero. Later fields extend the format; zero in them
// stands for the base format's constant:
//
//   offset  type  field                                             zero means
//   0x30    f32   rope_theta                                        1e6
//   0x34    f32   rms_norm_eps                                      1e-6
//   0x38    u32   rope_scaling, 1: YaRN                             none; the next six are zero
//   0x3C    f32   YaRN factor                                       an error, with YaRN
//   0x40    i32   YaRN original length                              an error, with YaRN
//   0x44    f32   YaRN beta_fast                                    32
//   0x48    f32   YaRN beta_slow                                    1
//   0x4C    f32   YaRN attention_factor, on cos and sin             0.1 ln(factor) + 1
//   0x50    u32   YaRN no_rounding, 1: the ramp's ends stay         they are rounded
//   0x54    u32   qkv_bias, 1: biases after the last matrix         none
//   0x58    u32   no_qk_norm, 1: there are no q_norm and k_norm     QK-norm
//   0x5C    i32   n_experts                                         not a mixture of experts
//   0x60    i32   n_experts_used                                    (without experts)
//   0x64    u32   no_topk_norm, 1: shares keep the sum they have    their sum becomes 1
//   0x68    u32   layer_bits, 4: layers' matrices have four bits    8
//   0x70    16i8  levels: what a nibble stands for, ascending       (with 8 bits)
//
// The rest (0x6C, and 0x80 to 0xFF) is zero. A file in which it is not is refused.
//
// The weights, each for all layers before the next:
//
//   fp32 norms    rms_att (dim), rms_ffn (dim); rms_final (dim), once; q_norm, k_norm (head_dim)
//   fp32 routers  (n_experts, dim), if there are experts
//   Q8_0          token embedding (vocab_size, dim), once; wq (q_dim, dim), wk, wv (kv_dim, dim),
//                 wo (dim, q_dim), w1 (hidden_dim, dim), w2 (dim, hidden_dim),
//                 w3 (hidden_dim, dim); the classifier (vocab_size, dim), once, unless it is shared
//                 (with experts, w1, w2 and w3 hold the rows of all: n_experts times as many)
//   fp32 biases   bq (q_dim), then bk, then bv (kv_dim), if qkv_bias is 1
//
// A Q8_0 matrix (out, in) is all its int8 values row by row, then a float scale for each group_size
// consecutive values: scale = max|w| / 127, q = round(w / scale). With layer_bits 4, a matrix of a
// layer is instead all its pairs of nibbles (see weight_q), then a float of 16 bits for each group.
// (Each has an even number of rows, so that the next matrix begins at a multiple of 4 bytes.)
// Embedding models, which need no classifier, count as shared.

typedef struct {  // takes a file apart from front to back, and never reads past its end
    const char *file;
    Bytes rest;
} Cursor;

static const void *take(Cursor *in, uint64_t size, const char *what) {
    if (size > in->rest.n)
        die("%s: ends inside %s, expected %llu more bytes, found %zu; copy or export it again",
            in->file, what, (unsigned long long)size, in->rest.n);
    const void *p = in->rest.p;
    in->rest = bytes_from(in->rest, size);
    return p;
}

static uint32_t take_u32(Cursor *in, const char *what) {
    return (uint32_t)load_i32(take(in, 4, what));
}

static void check_range(Cursor *in, const char *name, int value, int low, int high) {
    if (low == high && value != low)
        die("%s: bad %s, expected %d, found %d", in->file, name, low, value);
    if (value < low || value > high)
        die("%s: bad %s, expected %d to %d, found %d", in->file, name, low, high, value);
}

static int take_int(Cursor *in, const char *name, int low, int high) {  // low <= value <= high
    int value = (int)take_u32(in, name);
    check_range(in, name, value, low, high);
    return value;
}

// The same for a float; a 0 in the file becomes `base`.
static float take_float(Cursor *in, const char *name, float low, float high, float base) {
    float value = as_float(take_u32(in, name));
    if (value == 0) value = base;
    if (!(value >= low && value <= high))
        die("%s: bad %s, expected %g to %g, found %g", in->file, name, low, high, value);
    return value;
}

static void check_multiple(Cursor *in, const char *name, int value, int unit) {
    if (value % unit != 0)
        die("%s: bad %s, expected a multiple of %d, found %d", in->file, name, unit, value);
}

static void take_base_header(Config *c, Cursor *in) {
    uint32_t magic = take_u32(in, "magic");
    const char *slash = strrchr(in->file, '/'), *end = strrchr(in->file, '.');
    if (magic == 0x46554747)
        die("%s: a GGUF file, expected a .bin file, which this makes: export.py %s", in->file,
            in->file);
    if (end && !strcmp(end, ".safetensors"))
        die("%s: a part of a checkpoint, expected a .bin file, which this makes: export.py %.*s",
            in->file, slash ? (int)(slash - in->file) : 1, slash ? in->file : ".");
    if (magic != 0x616A6331)
        die("%s: not a qwen3.c model, expected a file made by export.py (magic 0x616a6331), "
            "found 0x%08x", in->file, magic);
    take_int(in, "version", 1, 1);
    c->dim = take_int(in, "dim", 1, 1 << 20);
    c->hidden_dim = take_int(in, "hidden_dim", 1, 1 << 20);
    c->n_layers = take_int(in, "n_layers", 1, 4096);
    c->n_heads = take_int(in, "n_heads", 1, 4096);
    c->n_kv_heads = take_int(in, "n_kv_heads", 1, 4096);
    c->vocab_size = take_int(in, "vocab_size", 1, 1 << 30);
    c->max_seq_len = take_int(in, "max_seq_len", 1, 1 << 30);
    c->head_dim = take_int(in, "head_dim", 1, 4096);
    c->shared_classifier = take_int(in, "shared_classifier", 0, 1);
    c->group_size = take_int(in, "group_size", 32, 256);
    if (c->group_size & (c->group_size - 1))
        die("%s: bad group_size, expected 32, 64, 128 or 256, found %d", in->file, c->group_size);
    check_multiple(in, "dim", c->dim, c->group_size);
    check_multiple(in, "hidden_dim", c->hidden_dim, c->group_size);
    check_multiple(in, "head_dim", c->head_dim, 2);
    if (c->n_heads % c->n_kv_heads != 0)
        die("%s: bad n_kv_heads, expected a divisor of %d heads, found %d", in->file, c->n_heads,
            c->n_kv_heads);
    check_multiple(in, "n_heads * head_dim", c->n_heads * c->head_dim, c->group_size);
    c->q_dim = c->n_heads * c->head_dim;
    c->kv_dim = c->n_kv_heads * c->head_dim;
}

static void take_extended_header(Config *c, Cursor *in) {
    static const char unknown[] = "unknown header field (made by a newer export.py?)";
    c->rope_theta = take_float(in, "rope_theta", 1e-6f, 1e12f, 1e6f);
    c->rms_norm_eps = take_float(in, "rms_norm_eps", FLT_MIN, 1e12f, 1e-6f);
    c->rope_scaling = take_int(in, "rope_scaling", 0, 1);
    if (c->rope_scaling) {
        c->yarn_factor = take_float(in, "YaRN factor", 1e-6f, 1e12f, 0);
        c->yarn_original_len = take_int(in, "YaRN original length", 1, INT_MAX);
        c->yarn_beta_fast = take_float(in, "YaRN beta_fast", 1e-6f, 1e12f, 32);
        c->yarn_beta_slow = take_float(in, "YaRN beta_slow", 1e-6f, 1e12f, 1);
        float base = 0.1f * logf(c->yarn_factor) + 1;
        c->yarn_attention_factor = take_float(in, "YaRN attention_factor", 1e-6f, 1e12f, base);
        c->yarn_no_rounding = take_int(in, "YaRN no_rounding", 0, 1);
    } else {
        for (int at = 0x3C; at < 0x54; at += 4) take_int(in, unknown, 0, 0);
    }
    c->qkv_bias = take_int(in, "qkv_bias", 0, 1);
    c->no_qk_norm = take_int(in, "no_qk_norm", 0, 1);
    c->n_experts = take_int(in, "n_experts", 0, 4096);
    c->n_experts_used = take_int(in, "n_experts_used", 0, 4096);
    check_range(in, "n_experts_used", c->n_experts_used, min_int(c->n_experts, 1), c->n_experts);
    c->no_topk_norm = take_int(in, "no_topk_norm", 0, c->n_experts > 0);
    if (c->n_experts * (int64_t)max_int(c->dim, c->hidden_dim) > 1 << 30)
        die("%s: bad n_experts, expected at most 2^30 rows in all experts, found %d of %d",
            in->file, c->n_experts, max_int(c->dim, c->hidden_dim));
    c->layer_bits = take_u32(in, "layer_bits");
    if (c->layer_bits != 0 && c->layer_bits != 4)
        die("%s: bad layer_bits, expected 0 (8 bits) or 4, found %d", in->file, c->layer_bits);
    take_int(in, unknown, 0, 0);
    if (c->layer_bits == 4) {
        memcpy(c->levels, take(in, 16, "levels"), 16);
        for (int i = 1; i < 16; i++) {
            if (c->levels[i] <= c->levels[i - 1])
                die("%s: bad levels, expected ascending ones, found %d after %d", in->file,
                    c->levels[i], c->levels[i - 1]);
        }
    } else {
        c->layer_bits = 8;
        for (int at = 0x70; at < 0x80; at += 4) take_int(in, "levels", 0, 0);
    }
    for (int at = 0x80; at < 256; at += 4) take_int(in, unknown, 0, 0);
}

static Matrix take_matrix(Cursor *in, const Config *c, int rows, int cols, int bits,
                          const char *what) {
    Matrix w = {.rows = rows, .cols = cols, .group = c->group_size, .bits = bits};
    const uint64_t count = (uint64_t)rows * cols, n_groups = count / c->group_size;
    if (bits == 8) {
        w.q = take(in, count, what);
        w.scale = take(in, n_groups * sizeof(float), what);
    } else {
        w.nibbles = take(in, count / 2, what);
        w.half_scale = take(in, n_groups * sizeof(uint16_t), what);
        w.levels = c->levels;
    }
    return w;
}

// A number that is not finite would choose experts at random.
static void check_router(const char *path, const Config *c, const float *router, int layer) {
    for (size_t i = 0; i < (size_t)c->n_experts * c->dim; i++) {
        if (!isfinite(router[i]))
            die("%s: bad router of layer %d, expected finite numbers, found %f", path, layer,
                router[i]);
    }
}

// Maps the file; all weights stay there.
static void model_map(Model *m, const char *path) {
    Config *c = &m->config;
    Weights *weights = &m->weights;
    Bytes file = file_map(path);
    Cursor in = {path, file};
    take_base_header(c, &in);
    take_extended_header(c, &in);
    const int experts = max_int(c->n_experts, 1);
    weights->layers = alloc(c->n_layers, sizeof(Layer), "the layers");
// `tensor` takes its bytes once for each layer.
#define TAKE_LAYERS(name, tensor) \
    for (int l = 0; l < c->n_layers; l++) weights->layers[l].name = tensor
#define TAKE_FLOATS(name, count) TAKE_LAYERS(name, take(&in, (uint64_t)(count) * 4, #name))
#define TAKE_MATRIX(name, rows, cols) \
    TAKE_LAYERS(name, take_matrix(&in, c, rows, cols, c->layer_bits, #name))
    TAKE_FLOATS(rms_att, c->dim);
    TAKE_FLOATS(rms_ffn, c->dim);
    weights->rms_final = take(&in, (uint64_t)c->dim * 4, "rms_final");
    if (!c->no_qk_norm) {
        TAKE_FLOATS(q_norm, c->head_dim);
        TAKE_FLOATS(k_norm, c->head_dim);
    }
    if (c->n_experts) TAKE_FLOATS(router, (uint64_t)c->n_experts * c->dim);
    weights->embedding = take_matrix(&in, c, c->vocab_size, c->dim, 8, "the token embedding");
    TAKE_MATRIX(wq, c->q_dim, c->dim);
    TAKE_MATRIX(wk, c->kv_dim, c->dim);
    TAKE_MATRIX(wv, c->kv_dim, c->dim);
    TAKE_MATRIX(wo, c->dim, c->q_dim);
    TAKE_MATRIX(w1, experts * c->hidden_dim, c->dim);
    TAKE_MATRIX(w2, experts * c->dim, c->hidden_dim);
    TAKE_MATRIX(w3, experts * c->hidden_dim, c->dim);
    weights->classifier = c->shared_classifier ? weights->embedding
        : take_matrix(&in, c, c->vocab_size, c->dim, 8, "the classifier");
    if (c->qkv_bias) {
        TAKE_FLOATS(bq, c->q_dim);
        TAKE_FLOATS(bk, c->kv_dim);
        TAKE_FLOATS(bv, c->kv_dim);
    }
    if (in.rest.n != 0)
        die("%s: wrong size, expected %zu bytes, found %zu", path, file.n - in.rest.n, file.n);
    for (int l = 0; l < c->n_layers && c->n_experts; l++) {
        check_router(path, c, weights->layers[l].router, l);
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
// length of the rest, then sections, each at most once: a tag of 4 bytes, u32 length, payload.
//
//   tag     payload                                           without this section
//   "adde"  u32 id, u32 special, for each added token by id;  tokens with score -1e6 or less and at
//           special ones are not printed                      least two bytes; <|...|> is special
//   "clas"  u32 first, u32 last, u32 class: characters that   right for ASCII; other characters
//           are letters (1), numbers (2), white space (3)     count as letters
//   "ccc "  u32 first, u32 last, u32 canonical combining      marks stay in their order
//           class, 1 to 255
//   "deco"  u32 character, u32 first, u32 second or 0, u32    no NFC
//           composes: canonical decompositions but for Hangul
//   "head"  u32 ids that go before every raw text             none
//   "tail"  u32 ids that go after every raw text              none
//   "stop"  u32 ids that end an answer                        eos, <|endoftext|> and <|im_end|>
//   "samp"  f32 temperature, f32 top_p, u32 top_k             0.6, 0.95, 20
//   "repe"  f32 repetition penalty                            1
//   "mode"  u32 what the model is made for: 0 chat, 1         0
//           generate, 2 tokenize, 3 perplexity, 4 embed
//   "chat"  12 times u32 length and bytes: the ChatFormat,    ChatML
//           in the order of take_chat
//
// Characters ascend in each section, and so do the ids of adde. The Unicode data is that of HF's
// tokenizers package, so that ids agree on every text. export.py finds the ChatFormat by rendering
// the checkpoint's template.

static int take_id(Cursor *in, const Tokenizer *tok, const char *what) {
    uint32_t id = take_u32(in, what);
    if (id >= (uint32_t)tok->vocab_size)
        die("%s: bad id in %s, expected less than %d, found %u", in->file, what, tok->vocab_size,
            id);
    return (int)id;
}

static void take_ids(Cursor *in, const Tokenizer *tok, const char *what, Ids *ids) {
    while (in->rest.n) ids_add(ids, take_id(in, tok, what));
}

static void added_insert(Tokenizer *tok, int id, bool special) {
    ids_add(&tok->added, id);
    tok->kind[id] = special ? ADDED | SPECIAL : ADDED;
    tok->added_start[tok->text[id].p[0]] = true;
}

static void take_added(Cursor *in, Tokenizer *tok, const char *what) {
    for (int id, last = -1; in->rest.n; last = id) {
        id = take_id(in, tok, what);
        if (id <= last || tok->text[id].n == 0)
            die("%s: bad token %d in %s, expected ascending ids with a text", in->file, id, what);
        added_insert(tok, id, take_int(in, what, 0, 1));
    }
}

// Tables of characters: BAD_BYTE + byte stands for a byte that is not UTF-8.
enum { BAD_BYTE = 0x110000, N_CHARS = BAD_BYTE + 256 };
enum { CLASS_MASK = 3, NFC_ACTIVE = 4, CCC_SHIFT = 8 };  // the bits of Tokenizer.chars

// Reads ranges of characters with a value of 1 .. highest each; ORs value << shift and `bits` into
// Tokenizer.chars.
static void take_ranges(Cursor *in, Tokenizer *tok, const char *what, uint32_t highest, int shift,
                        int bits) {
    for (uint32_t next = 0; in->rest.n;) {
        uint32_t first = take_u32(in, what), last = take_u32(in, what), value = take_u32(in, what);
        if (first < next || last < first || last >= BAD_BYTE || value < 1 || value > highest)
            die("%s: bad range in %s, expected ascending ones with 1 to %u, found %x to %x: %u",
                in->file, what, highest, first, last, value);
        for (next = first; next <= last; next++) {
            tok->chars[next] |= value << shift | bits;
        }
    }
}

// c decomposes into `first` and `second`; if `second` is 0, c is just another code for `first`. If
// the pair composes again, NFC leaves c alone, and only a text with `second` needs work; otherwise
// every c must be replaced.
static void add_decomposition(Tokenizer *tok, uint32_t c, uint32_t first, uint32_t second,
                              bool composes) {
    uint64_t parts = (uint64_t)first << 32 | second;
    tok->decomposed[tok->n_decomposed++] = (Mapping){c, parts};
    if (composes) tok->composed[tok->n_composed++] = (Mapping){parts, c};
    tok->chars[composes ? second : c] |= NFC_ACTIVE;
}

static int compare_u64(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// Canonical decompositions. Those of Hangul syllables (a lead, a vowel and perhaps a tail) follow
// from their numbers: Unicode Standard, section 3.12.
static void take_decompositions(Cursor *in, Tokenizer *tok, const char *what) {
    enum { FIRST_SYLLABLE = 0xAC00, SYLLABLES = 19 * 21 * 28 };
    size_t most = in->rest.n / 16 + SYLLABLES;
    if (in->rest.n == 0) return;
    tok->decomposed = alloc(most, sizeof(Mapping), "the tokenizer");
    tok->composed = alloc(most, sizeof(Mapping), "the tokenizer");
    for (uint32_t next = 0; in->rest.n;) {
        uint32_t c = take_u32(in, what), first = take_u32(in, what);
        uint32_t second = take_u32(in, what), composes = take_u32(in, what);
        if (c < next || c - FIRST_SYLLABLE < SYLLABLES || c >= BAD_BYTE || first >= BAD_BYTE ||
            second >= BAD_BYTE || composes > 1)
            die("%s: bad record in section %s, found %x = %x + %x", in->file, what, c, first,
                second);
        add_decomposition(tok, c, first, second, composes);
        next = c + 1;
    }
    for (uint32_t i = 0; i < SYLLABLES; i++) {
        uint32_t syllable = FIRST_SYLLABLE + i, tail = i % 28;
        if (tail) add_decomposition(tok, syllable, syllable - tail, 0x11A7 + tail, true);
        else add_decomposition(tok, syllable, 0x1100 + i / 28 / 21, 0x1161 + i / 28 % 21, true);
    }
    qsort(tok->decomposed, tok->n_decomposed, sizeof(Mapping), compare_u64);
    qsort(tok->composed, tok->n_composed, sizeof(Mapping), compare_u64);
}

static void take_sampling(Cursor *in, Tokenizer *tok) {
    tok->temperature = take_float(in, "sampling temperature", 0, 1e6f, 0);
    tok->top_p = take_float(in, "sampling top_p", 1e-45f, 1, 0);
    tok->top_k = take_int(in, "sampling top_k", 0, INT_MAX);
}

static void take_chat(Cursor *in, Tokenizer *tok, const char *what) {
    ChatFormat *f = &tok->chat;
    Bytes *pieces[] = {&f->start, &f->no_system, &f->open[SYSTEM], &f->close[SYSTEM],
                       &f->open[USER], &f->close[USER], &f->open[ASSISTANT], &f->close[ASSISTANT],
                       &f->answer[0], &f->answer[1], &f->strip, &f->trim};
    for (size_t i = 0; i < sizeof(pieces) / sizeof(*pieces); i++) {
        pieces[i]->n = take_u32(in, what);
        pieces[i]->p = take(in, pieces[i]->n, what);
    }
    tok->has_chat = true;
}

static void take_section(Cursor *in, Tokenizer *tok, const char *tag) {
    if (!strcmp(tag, "adde")) take_added(in, tok, tag);
    else if (!strcmp(tag, "clas")) take_ranges(in, tok, tag, SPACE, 0, 0), tok->has_classes = true;
    else if (!strcmp(tag, "ccc ")) take_ranges(in, tok, tag, 255, CCC_SHIFT, NFC_ACTIVE);
    else if (!strcmp(tag, "deco")) take_decompositions(in, tok, tag);
    else if (!strcmp(tag, "head")) take_ids(in, tok, tag, &tok->head);
    else if (!strcmp(tag, "tail")) take_ids(in, tok, tag, &tok->tail);
    else if (!strcmp(tag, "stop")) take_ids(in, tok, tag, &tok->stop);
    else if (!strcmp(tag, "samp")) take_sampling(in, tok);
    else if (!strcmp(tag, "repe")) tok->repetition = take_float(in, "penalty", 1e-6f, 1e12f, 0);
    else if (!strcmp(tag, "mode")) tok->mode = take_int(in, "mode", 0, N_MODES - 1);
    else if (!strcmp(tag, "chat")) take_chat(in, tok, tag);
    else die("%s: unknown section \"%s\"; was it made by a newer export.py?", in->file, tag);
    if (in->rest.n) die("%s: bad section %s, expected %zu bytes fewer", in->file, tag, in->rest.n);
}

static void take_extension(Cursor *in, Tokenizer *tok) {
    if (memcmp(take(in, 4, "the extension"), "q3tx", 4) != 0)
        die("%s: wrong bytes after token %d, expected q3tx or the end; is it another model's?",
            in->file, tok->vocab_size - 1);
    take_int(in, "extension version", 1, 1);
    uint32_t length = take_u32(in, "the extension");
    if (length != in->rest.n)
        die("%s: bad extension length, expected %zu, found %u", in->file, in->rest.n, length);
    static const char tags[] = "adde clas ccc  deco head tail stop samp repe mode chat ";
    uint64_t seen = 0;  // bit i: the tag at offset i of `tags`
    while (in->rest.n) {
        char tag[5] = "";
        memcpy(tag, take(in, 4, "a section"), 4);
        const char *known = strstr(tags, tag);
        uint64_t bit = known ? (uint64_t)1 << (known - tags) : 0;
        if (seen & bit) die("%s: section %s is there twice", in->file, tag);
        size_t n = take_u32(in, tag);
        take_section(&(Cursor){in->file, {take(in, n, tag), n}}, tok, tag);
        seen |= bit;
    }
}

// The classes of characters for files without section clas
static void default_classes(uint16_t *chars) {
    for (uint32_t c = 0; c < BAD_BYTE; c++) {
        bool letter = c >= 128 || isalpha(c);
        chars[c] |= letter ? LETTER : isspace(c) ? SPACE : isdigit(c) ? NUMBER : OTHER;
    }
}

static const float ADDED_SCORE = -1e6f;  // tokens that come out of merges have a higher score

// The added tokens of files without section adde
static void default_added(Tokenizer *tok) {
    for (int id = 0; id < tok->vocab_size; id++) {
        Bytes s = tok->text[id];
        bool special = s.n > 4 && !memcmp(s.p, "<|", 2) && !memcmp(s.p + s.n - 2, "|>", 2);
        if (tok->score[id] <= ADDED_SCORE && s.n > 1) added_insert(tok, id, special);
    }
}

static void take_tokens(Cursor *in, Tokenizer *tok) {
    tok->text = alloc(tok->vocab_size, sizeof(Bytes), "the tokenizer");
    tok->score = alloc(tok->vocab_size, sizeof(float), "the tokenizer");
    tok->kind = alloc(tok->vocab_size, 1, "the tokenizer");
    for (int id = 0; id < tok->vocab_size && in->rest.n; id++) {
        tok->score[id] = as_float(take_u32(in, "a token's score"));
        size_t n = take_u32(in, "a token's length");
        tok->text[id] = (Bytes){take(in, n, "a token's text"), n};
        if (isnan(tok->score[id]))
            die("%s: bad score of token %d, expected a number", in->file, id);
    }
}

// The slot of the hash table that holds the token with these bytes, or is free for it. FNV-1a with
// 64 bits and a secret factor; the slot comes from both halves of a last product (as in wyhash).
static uint32_t *token_slot(const Tokenizer *tok, Bytes text) {
    uint64_t hash = tok->seed[0];
    for (size_t i = 0; i < text.n; i++) hash = (hash ^ text.p[i]) * tok->seed[1];
    __uint128_t folded = (__uint128_t)hash * tok->seed[1];
    uint32_t slot = (uint32_t)(folded ^ folded >> 64) & tok->mask;
    while (tok->table[slot] && !bytes_equal(tok->text[tok->table[slot] - 1], text)) {
        slot = (slot + 1) & tok->mask;
    }
    return &tok->table[slot];
}

static int token_find(const Tokenizer *tok, Bytes text) { return (int)*token_slot(tok, text) - 1; }

// The added token with this text, or -1
static int added_find(const Tokenizer *tok, const char *text) {
    for (size_t i = 0; i < tok->added.n; i++) {
        if (bytes_equal(tok->text[tok->added.p[i]], bytes(text))) return tok->added.p[i];
    }
    return -1;
}

static void index_tokens(Tokenizer *tok, const char *file) {
    uint64_t rng = (uint64_t)(now() * 1e9) ^ (uintptr_t)tok->text;  // differs in each process
    for (int i = 0; i < 2; i++) {
        tok->seed[i] = (uint64_t)(random_next(&rng) * 0x1p53) * 0x9E3779B97F4A7C15u | 1;
    }
    uint32_t slots = 256;
    while (slots < 2 * (uint32_t)tok->vocab_size) slots *= 2;
    tok->table = alloc(slots, sizeof(*tok->table), "the tokenizer");
    tok->mask = slots - 1;
    for (int id = 0; id < tok->vocab_size; id++) {
        Bytes s = tok->text[id];
        bool indexed = s.n == 1 || (s.n > 1 && tok->score[id] > ADDED_SCORE);
        if (!indexed || tok->kind[id] & ADDED) continue;
        uint32_t *slot = token_slot(tok, s);
        if (*slot == 0) *slot = id + 1;
    }
    for (int i = 0; i < 256; i++) {
        tok->byte_token[i] = token_find(tok, (Bytes){(uint8_t[]){i}, 1});
        if (tok->byte_token[i] < 0)
            die("%s: no token for byte 0x%02x, expected all 256; is it another model's?", file, i);
    }
}

static void tokenizer_load(Tokenizer *tok, const char *file, int vocab_size) {
    Cursor in = {file, file_map(file)};
    *tok = (Tokenizer){.vocab_size = vocab_size, .temperature = 0.6f, .top_p = 0.95f, .top_k = 20,
                       .repetition = 1};
    tok->chars = alloc(N_CHARS, sizeof(uint16_t), "the tokenizer");
    take_u32(&in, "max_token_length");
    int bos = take_id(&in, tok, "the bos id"), eos = take_id(&in, tok, "the eos id");
    take_tokens(&in, tok);
    if (in.rest.n) take_extension(&in, tok);
    if (!tok->has_classes) default_classes(tok->chars);
    if (tok->added.n == 0) default_added(tok);
    index_tokens(tok, file);
    tok->think = added_find(tok, "<think>");
    tok->end_think = added_find(tok, "</think>");
    tok->end_of_text = added_find(tok, "<|endoftext|>");
    if (tok->end_of_text < 0) tok->end_of_text = bos;
    if (!tok->has_chat) tok->chat = chatml(tok->think >= 0);
    if (tok->stop.n == 0) {
        const int im_end = added_find(tok, "<|im_end|>");
        ids_add(&tok->stop, eos);
        ids_add(&tok->stop, tok->end_of_text);
        if (im_end >= 0) ids_add(&tok->stop, im_end);
    }
}

// ------------------------------------------------------------------------------------------------
// Unicode: UTF-8, and normalization form C (NFC; Unicode Standard Annex 15)

// The character at offset `at` (RFC 3629: neither overlong forms nor surrogates)
static Char char_at(const Tokenizer *tok, Bytes text, size_t at) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};  // of characters of n bytes
    if (at >= text.n) return (Char){0, 0, END, false};
    const uint8_t *p = text.p + at;
    int n = p[0] < 0x80 ? 1 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    uint32_t c = n == 1 ? p[0] : p[0] & (0x7F >> n);
    bool bad = n > 1 && (p[0] < 0xC2 || p[0] > 0xF4 || text.n - at < (size_t)n);
    for (int i = 1; i < n && !bad; i++) {
        bad = (p[i] & 0xC0) != 0x80;
        c = c << 6 | (p[i] & 0x3F);
    }
    if (bad || c < least[n] || c >= BAD_BYTE || (c >= 0xD800 && c < 0xE000))
        c = BAD_BYTE + p[0], n = 1;
    return (Char){c, n, tok->chars[c] & CLASS_MASK, tok->chars[c] & NFC_ACTIVE};
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

static uint64_t map_find(const Mapping *map, size_t n, uint64_t from) {  // 0: `from` is not in it
    const Mapping *m = bsearch(&from, map, n, sizeof(Mapping), compare_u64);
    return m ? m->to : 0;
}

// Appends the full canonical decomposition of c. Unicode needs at most 4 levels, but an untrusted
// file could recurse without end.
static void decompose(const Tokenizer *tok, Marks *out, uint32_t c, int steps) {
    uint64_t parts = map_find(tok->decomposed, tok->n_decomposed, c);
    uint64_t ccc = tok->chars[c] >> CCC_SHIFT;
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
    uint64_t *out = marks->p, *starter = NULL;
    int last = -1;  // ccc of the character before, -1 if that is the starter
    for (size_t i = 0; i < marks->n; i++) {
        int ccc = (int)(marks->p[i] >> 56);
        uint64_t composed = 0, c = marks->p[i] & CODE_POINT;
        if (starter && last < ccc)
            composed = map_find(tok->composed, tok->n_composed, (*starter & CODE_POINT) << 32 | c);
        if (composed) {
            *starter = composed;
            continue;
        }
        if (ccc == 0) starter = out;
        last = ccc == 0 ? -1 : ccc;
        *out++ = marks->p[i];
    }
    marks->n = out - marks->p;
}

// Appends NFC(text). Text without active characters is copied. A run of active characters is
// normalized together with the one character before it, with which it may compose.
static void normalize(const Tokenizer *tok, Buffer *out, Bytes text) {
    Marks chars = {0};
    size_t done = 0;    // `out` has NFC of the text up to here
    size_t before = 0;  // where the last inactive character begins
    for (size_t at = 0; at < text.n && !interrupted;) {
        Char c = char_at(tok, text, at);
        if (!c.active) {
            before = at;
            at += c.n;
            continue;
        }
        buffer_add(out, (Bytes){text.p + done, before - done});
        chars.n = 0;
        for (at = before; (c = char_at(tok, text, at)).n && (at == before || c.active);) {
            decompose(tok, &chars, c.c, 0);
            at += c.n;
        }
        order_and_compose(tok, &chars);
        for (size_t i = 0; i < chars.n; i++) add_char(out, chars.p[i] & CODE_POINT);
        done = before = at;
    }
    buffer_add(out, bytes_from(text, done));
    free(chars.p);
}

// ------------------------------------------------------------------------------------------------
// Drafts: prompt lookup decoding (Saxena 2023). An answer often repeats what the context holds:
// code that it changes, text that it quotes. Where the last NGRAM tokens occurred before, the
// tokens that followed there are a draft of what comes next. One forward pass runs all of them, and
// so reads the weights only once.
//
// advance() gives out the rows of that pass one by one, for as long as sampling picks the draft's
// tokens; the first other token starts a new pass, which overwrites the rest of the draft in the
// cache. A batch gives the same bits as single tokens, and random numbers are drawn only for rows
// that are used. So drafts change the time and nothing else: the text is the same, not just its
// distribution as in speculative decoding (Leviathan et al., arXiv 2211.17192).
//
// One pass runs the last token and its draft: draft_rows() tokens, which take about as long as one,
// or twice as many after a draft that was right to its end. Credit is counted in 1 / DRAFT_COST of
// a token's time. Every pass earns 1, the prompt 1 for each 16 tokens that had to run, every right
// token DRAFT_COST. A pass with a draft costs DRAFT_COST for each draft_rows() tokens; with four
// bits, which leave a token less memory to wait for, for each two tokens; with experts, which
// differ from token to token, for each drafted one. So wrong drafts take about 2 % of the time.
// Without SIMD, where a batch takes as long as its tokens, and with -b 1 there are no drafts.
//
// Measured with the 0.6B shape, two Zen 5 cores, texts of 300 to 400 tokens and AVX-512 (AVX2):
//
//   the prompt's code as it was some weeks later        2.9 times as fast (1.9), 1.7 if more is new
//   the prompt's text, here and there a word more       5 times (2.9)
//   25 tokens over and over                             4 times
//   new prose, new code                                 1.3 % slower to 4 % faster
//   made so that every draft is wrong                   1.2 % slower (1.2 %), with -j 1 2.2 %
enum { NGRAM = 5, DRAFT_COST = 50 };

// Finds the latest earlier place where the last NGRAM of the n ids occur, and appends the `most`
// ids that follow there; where it runs into what it appends, the draft repeats itself. Returns
// `most`, or 0 if there is no such place.
static int lookup(int *ids, size_t n, int most) {
    for (size_t from = n - 1; most > 0 && from >= NGRAM; from--) {
        if (memcmp(ids + from - NGRAM, ids + n - NGRAM, NGRAM * sizeof(int)) != 0) continue;
        for (int i = 0; i < most; i++) ids[n + i] = ids[from + i];
        return most;
    }
    return 0;
}

// Drafts what may follow the answer's count-th token, which stands at cached.p[cached.n]. Returns
// how many tokens: the cache, the logits and max_new must have room for them.
static int draft(Engine *e, int count, bool was_right) {
    int *credit = &e->draft.credit;
    const State *s = &e->model.state;
    int rows = min_int(was_right ? 2 * draft_rows() : draft_rows(), s->logit_rows);
    rows = min_int(rows, s->seq_len - (int)e->cached.n);
    if (e->max_new >= 0) rows = min_int(rows, e->max_new - count);
    *credit = min_int(*credit + 1, 8 * DRAFT_COST);  // at most 8 wrong drafts in a row
    if (count < NGRAM || *credit < DRAFT_COST) return 0;
    int drafted = lookup(e->cached.p, e->cached.n + 1, rows - 1);
    const Config *c = &e->model.config;
    const int cost = c->n_experts ? drafted : drafted / (c->layer_bits == 4 ? 2 : draft_rows()) + 1;
    if (drafted) *credit -= DRAFT_COST * cost;
    return drafted;
}

static void advance_start(Engine *e) {
    e->draft.n = e->draft.row = 0;
    e->draft.credit += (int)(e->cached.n - e->reused) / 16;  // the time of the prompt, in tokens
}

static float *advance(Engine *e, int id, int count) {
    Model *m = &e->model;
    Ids *cached = &e->cached;
    const bool was_drafted = e->draft.row < e->draft.n && cached->p[cached->n] == id;
    cached->p[cached->n] = id;
    if (was_drafted) {  // it has run already
        e->draft.credit += DRAFT_COST;
        e->draft.row++;
    } else {
        e->draft.n = draft(e, count, e->draft.n && e->draft.row == e->draft.n);
        e->draft.row = 0;
        const int n = 1 + e->draft.n;
        if (!forward(m, cached->p + cached->n, n, (int)cached->n, n)) return NULL;
        classify(m, 0, n);
    }
    cached->n++;
    return m->state.logits + (size_t)e->draft.row * m->config.vocab_size;
}

// ------------------------------------------------------------------------------------------------
// Writing: messages, and an answer as it comes. No file and no model drives the terminal: control
// characters are shown as U+FFFD. In chat, thinking is dimmed on a terminal; elsewhere it goes to
// stderr, so that stdout holds just the answer.

// Copies n bytes of text to out (3 n) as a terminal may show it: a control character (U+0000 to
// U+001F, U+007F to U+009F) that is not one of `allowed` becomes U+FFFD. So does a carriage return
// that no newline follows, and a byte C2 that no second byte follows: the next text could make it a
// control character (C2 80 to C2 9F). Returns out's new size.
static size_t printable(char *out, const char *text, size_t n, const char *allowed) {
    size_t size = 0;
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = text[i], next = i + 1 < n ? text[i + 1] : 0;
        const bool c1 = c == 0xC2 && (next & 0xE0) != 0xA0;
        const bool plain = c >= ' ' && c != 127 && !c1, newline = c == '\r' && next == '\n';
        const bool shown = plain || (c && strchr(allowed, c) && (c != '\r' || newline));
        if (shown) out[size++] = text[i];
        else size += 3, memcpy(out + size - 3, "\uFFFD", 3);
        i += c1 && (next & 0xE0) == 0x80;
    }
    return size;
}

static void report(const char *fmt, ...) {
    char text[1024], line[3 * sizeof(text)];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    fprintf(stderr, "qwen3: %.*s\n", (int)printable(line, text, strlen(text), ""), line);
}

struct Writer {
    bool chat;      // thinking is set apart from the answer
    bool terminal;  // stdout is a terminal
    bool dim;       // thinking is dimmed there
    bool thinking;
    bool began;     // false from the end of thinking until a character other than a newline
    Bytes stop;     // -x: the answer ends before this text
    size_t cut;     // bytes that were drawn, but are not written because of it
    Buffer held;    // text that is not written yet
    Buffer shown;   // as it goes to a terminal
};

// How many bytes at the end must wait for what follows: an unfinished UTF-8 character; on a
// terminal also a carriage return, which is shown only before a newline
static size_t unfinished(Bytes text, bool terminal) {
    if (terminal && text.n && text.p[text.n - 1] == '\r') return 1;
    for (size_t n = 1; n <= 3 && n <= text.n; n++) {
        const uint8_t *p = text.p + text.n - n;
        if ((p[0] & 0xC0) == 0x80) continue;
        size_t needs = p[0] >= 0xF0 ? 4 : p[0] >= 0xE0 ? 3 : 2;
        if (p[0] < 0xC2 || p[0] > 0xF4 || n >= needs) return 0;
        uint8_t low = p[0] == 0xE0 ? 0xA0 : p[0] == 0xF0 ? 0x90 : 0x80;
        uint8_t high = p[0] == 0xED ? 0x9F : p[0] == 0xF4 ? 0x8F : 0xBF;
        return n == 1 || (p[1] >= low && p[1] <= high) ? n : 0;
    }
    return 0;
}

// How many bytes at the end may still become the stop text
static size_t unfinished_stop(Bytes text, Bytes stop) {
    for (size_t n = stop.n ? stop.n - 1 : 0; n > 0; n--) {
        if (n <= text.n && memcmp(text.p + text.n - n, stop.p, n) == 0) return n;
    }
    return 0;
}

// A text as a terminal may show it: see printable. Each piece is dimmed by itself, in one write: no
// signal can leave the terminal dim.
static Bytes for_terminal(Writer *out, Bytes text, bool dim) {
    if (text.n == 0) return text;
    Buffer *shown = &out->shown;
    shown->p = grow(shown->p, &shown->cap, 0, 3 * text.n + 8, 1);
    memcpy(shown->p, "\033[2m", 4);
    shown->n = 4 * dim;
    shown->n += printable((char *)shown->p + shown->n, (const char *)text.p, text.n, "\n\r\t");
    if (dim) buffer_add(shown, bytes("\033[0m"));
    return bytes_of(shown);
}

// Writes what is held, except its last `keep` bytes.
static void writer_flush(Writer *out, size_t keep) {
    Bytes text = {out->held.p, out->held.n - keep};
    const bool thinking = out->chat && out->thinking;
    if (out->terminal) text = for_terminal(out, text, thinking && out->dim);
    else if (thinking && is_terminal(STDERR_FILENO)) text = for_terminal(out, text, false);
    if (out->terminal || !thinking) write_stdout(text);
    else if (!quiet) fwrite(text.p, 1, text.n, stderr);
    if (keep) memmove(out->held.p, out->held.p + out->held.n - keep, keep);
    out->held.n = keep;
}

static void writer_thinks(Writer *out, bool thinking) {
    if (!out->chat || out->thinking == thinking) return;
    writer_flush(out, 0);
    if (!thinking && !out->terminal && !quiet) fputc('\n', stderr);
    out->thinking = thinking;
    out->began = thinking;
}

// Takes the newlines between thinking and answer out of the answer. Only a terminal shows them.
static void writer_begin(Writer *out) {
    Bytes text = bytes_of(&out->held);
    while (text.n && *text.p == '\n') text = bytes_from(text, 1);
    if (out->terminal) {
        writer_flush(out, text.n);
    } else {
        if (text.n) memmove(out->held.p, text.p, text.n);
        out->held.n = text.n;
    }
    out->began = text.n > 0;
}

static bool writer_token(Writer *out, const Tokenizer *tok, int id) {
    if (id == tok->think) writer_thinks(out, true);
    if (!(tok->kind[id] & SPECIAL)) {
        buffer_add(&out->held, tok->text[id]);
        if (!out->began) writer_begin(out);
        const Bytes held = bytes_of(&out->held), stop = out->thinking ? (Bytes){0} : out->stop;
        for (size_t at = 0; stop.n && at + stop.n <= held.n; at++) {
            if (memcmp(held.p + at, stop.p, stop.n) != 0) continue;
            out->cut = held.n - at;
            out->held.n = at;
            return false;
        }
        const size_t keep = unfinished_stop(held, stop);
        const Bytes rest = {held.p, held.n - keep};
        writer_flush(out, keep + unfinished(rest, out->terminal || out->thinking));
    }
    if (id == tok->end_think) writer_thinks(out, false);
    return true;
}

static void writer_end(Writer *out) {
    writer_flush(out, 0);
    writer_thinks(out, false);
    out->began = true;
    if (out->chat || out->terminal) write_stdout(bytes("\n"));
}

// ------------------------------------------------------------------------------------------------
// Conversation: a prompt and its answer, turns that fit into the context, messages from a terminal

static const char *const mode_names[] = {
    [CHAT] = "chat", [GENERATE] = "generate", [TOKENIZE] = "tokenize",
    [PERPLEXITY] = "perplexity", [EMBED] = "embed"};

typedef struct {  // as given on the command line
    const char *model, *text, *file, *system;  // NULL: not given
    int mode;                                  // -1: not given
    int think;                                 // -1: not given
    const char *stop;
    float temperature, top_p, repetition;      // -1: not given
    float presence;
    int top_k, context, threads;               // -1: not given
    int n;                                     // -1: no limit
    int batch;
    uint64_t seed;
    bool verbose;
} Options;

typedef struct {
    Options options;
    Engine engine;
    Writer writer;
    Mode mode;        // -m, or what the model is made for
    bool think;       // -r 1, and the model's thinking can be switched
    bool no_switch;   // -r was given, but the model's thinking can't be switched
    bool noticed;     // the notices have been given
    Conversation conversation;
    Buffer input;     // the prompt, or the message being typed
    Buffer typed;     // bytes of stdin, of which the first line_end have been used
    size_t line_end;
} App;

// Does the prompt itself open the thinking?
static bool begins_thinking(const App *app) {
    Bytes answer = app->engine.tokenizer.chat.answer[app->think];
    return find_last(answer, bytes("<think>")) > find_last(answer, bytes("</think>"));
}

// Notices wait until the last check has passed, so that an error message stands alone.
static void give_notices(App *app) {
    if (app->noticed) return;
    app->noticed = true;
    const Options *o = &app->options;
    if (!app->engine.tokenizer.has_classes)
        notice("tokenizer: no Unicode data, exact on ASCII only; export the model again");
    if (o->mode < 0 && app->mode != CHAT)
        notice("mode: %s, as this is not a chat model; -m chat overrides this",
               mode_names[app->mode]);
    if (app->no_switch) notice("-r: no effect, this model's thinking can't be switched");
    if (app->mode != CHAT && o->system) notice("-y: no effect, only -m chat has a system prompt");
    if (app->mode != CHAT && o->think >= 0) notice("-r: no effect, only -m chat thinks");
    if (app->mode > GENERATE && o->stop) notice("-x: no effect, only an answer can end early");
    if (app->mode == CHAT && app->engine.sampler.temperature == 0 &&
        (app->think || begins_thinking(app)))
        notice("-t 0: greedy thinking tends to repeat without end, Qwen advises 0.6");
}

// What stderr says before the model runs
static void announce(App *app, const Ids *ids) {
    give_notices(app);
    if (!app->options.verbose) return;
    fputs("prompt ids:", stderr);
    for (size_t i = 0; i < ids->n; i++) fprintf(stderr, " %d", ids->p[i]);
    fputc('\n', stderr);
}

static void report_too_long(const App *app, size_t tokens) {
    report("prompt: too long, expected at most %d tokens (-c, up to %d), found %zu",
           app->engine.model.state.seq_len, app->engine.model.config.max_seq_len, tokens);
}

// Checks a prompt's length and runs it. Returns what prefill returns.
static int checked_prefill(App *app, const Ids *prompt) {
    if (prompt->n > (size_t)app->engine.model.state.seq_len) {
        report_too_long(app, prompt->n);
        exit(EXIT_FAILURE);
    }
    if (prompt->n == 0) die("prompt: empty, expected at least one token");
    announce(app, prompt);
    return prefill(&app->engine, prompt);
}

// A rate with three significant digits (from 0.1 on)
static const char *rate_text(char text[16], double rate) {
    const double k = rate / 1000;
    if (rate >= 9995) snprintf(text, 16, k < 99.95 ? "%.1fk" : "%.0fk", k);
    else if (rate >= 999.5) snprintf(text, 16, "%.0f0", rate / 10);
    else if (rate >= 9.995) snprintf(text, 16, rate < 99.95 ? "%.1f" : "%.0f", rate);
    else snprintf(text, 16, rate < 0.9995 ? "%.3f" : "%.2f", rate);
    return text;
}

static void print_statistics(const App *app, size_t prompt, double prompt_rate, size_t answer,
                             double answer_rate) {
    char a[16], b[16];
    fprintf(stderr, "prompt %zu tokens at %s/s (%zu cached), answer %zu at %s/s, seed %llu\n",
            prompt, rate_text(a, prompt_rate), app->engine.reused, answer,
            rate_text(b, answer_rate), (unsigned long long)app->options.seed);
}

// After an answer that -x ended: takes back the tokens whose bytes were not written. If one of them
// was written in part, the bytes that were written become the message's text.
static void cut_answer(const App *app, Message *answer) {
    const Tokenizer *tok = &app->engine.tokenizer;
    for (size_t cut = app->writer.cut; cut > 0;) {
        const int id = answer->ids.p[--answer->ids.n];
        const Bytes text = tok->kind[id] & SPECIAL ? (Bytes){0} : tok->text[id];
        const size_t lost = cut < text.n ? cut : text.n;
        if (lost < text.n) buffer_add(&answer->text, (Bytes){text.p, text.n - lost});
        cut -= lost;
    }
}

// Runs a prompt and writes its answer; then notices and statistics. message: empty, gets the answer
static Ending respond(App *app, const Ids *prompt, Message *message) {
    Ids *answer = &message->ids;
    Engine *e = &app->engine;
    const int seq_len = e->model.state.seq_len;
    app->writer.cut = 0;
    double start = now();
    int row = checked_prefill(app, prompt);
    double middle = now();
    const size_t done = e->cached.n;  // after Ctrl-C not the whole prompt
    // Decoding allocates nothing: there is room for every answer.
    answer->p = grow(answer->p, &answer->cap, 0, seq_len + 1, sizeof(int));
    Ending ending = row < 0 ? INTERRUPTED : generate(e, row, answer);
    double end = now();
    bool thinking = app->writer.thinking;
    writer_end(&app->writer);
    if (ending == CONTEXT_ENDED)
        notice("answer: stopped, the context of %d tokens is full (-c)", seq_len);
    if (thinking && (ending == CONTEXT_ENDED || ending == LIMIT_REACHED))
        notice("answer: ended inside its thinking after %zu tokens (-n, -c)", answer->n);
    if (!quiet)
        print_statistics(app, done, (done - e->reused) / (middle - start + 1e-9), answer->n,
                         answer->n / (end - middle + 1e-9));
    cut_answer(app, message);
    return ending;
}

static Message *conversation_push(Conversation *talk, Message message) {
    talk->p = grow(talk->p, &talk->cap, talk->n, 1, sizeof(Message));
    talk->p[talk->n] = message;
    return &talk->p[talk->n++];
}

static Message *conversation_add(Conversation *talk, int role, Bytes text) {
    Message *message = conversation_push(talk, (Message){.role = role});
    buffer_add(&message->text, text);
    return message;
}

static void message_free(const Message *message) {
    free(message->text.p);
    free(message->ids.p);
}

// Removes `count` messages from number `first` on.
static void conversation_drop(Conversation *talk, size_t first, size_t count) {
    for (size_t i = first; i < first + count; i++) message_free(&talk->p[i]);
    memmove(talk->p + first, talk->p + first + count, (talk->n - first - count) * sizeof(Message));
    talk->n -= count;
}

// Renders the conversation without its turns before message `first`; the system message stays.
static void render_from(App *app, size_t first, Ids *ids) {
    const Conversation *talk = &app->conversation;
    Conversation rest = {0};
    rest.p = grow(NULL, &rest.cap, 0, talk->n, sizeof(Message));
    if (talk->p[0].role == SYSTEM) rest.p[rest.n++] = talk->p[0];
    for (size_t i = first; i < talk->n; i++) rest.p[rest.n++] = talk->p[i];
    render(&app->engine.tokenizer, &rest, app->think, ids);
    free(rest.p);
}

// Renders the conversation. If that leaves no room for an answer, the oldest turns are forgotten
// until half the context is free. How many that takes is estimated from where each message began
// in the first rendering. If the second one is still too long, only the last message stays (and the
// system message). False: even that is too long, or Ctrl-C was pressed.
static bool fit_conversation(App *app, Ids *ids) {
    Conversation *talk = &app->conversation;
    const size_t context = app->engine.model.state.seq_len, system = talk->p[0].role == SYSTEM;
    const size_t last = talk->n - 1, half = context / 2;
    size_t room = context / 4, first = system;
    if (app->options.n >= 0 && (size_t)app->options.n < room) room = app->options.n;
    render(&app->engine.tokenizer, talk, app->think, ids);
    if (ids->n + room <= context) return true;
    const Message *p = talk->p;
    while (first < last && ids->n - (p[first].start - p[system].start) > half) first += 2;
    render_from(app, first, ids);
    if (ids->n > half && first < last) render_from(app, first = last, ids);
    if (interrupted || ids->n > context) return false;
    if (first > system) {
        conversation_drop(talk, system, first - system);
        notice("context: no room in %zu tokens (-c), forgotten turns: %zu", context,
               (first - system) / 2);
    }
    return true;
}

// A user's message and the model's answer to it. exit_on_error is false in a dialogue: it goes on
// after an error, and says so when a message is taken back.
static Ending chat_turn(App *app, Bytes text, bool exit_on_error) {
    Conversation *talk = &app->conversation;
    Ids ids = {0};
    conversation_add(talk, USER, text);
    if (!fit_conversation(app, &ids) && !interrupted) {
        report_too_long(app, ids.n);
        if (exit_on_error) exit(EXIT_FAILURE);
        conversation_drop(talk, talk->n - 1, 1);
        free(ids.p);
        return CONTEXT_ENDED;
    }
    writer_thinks(&app->writer, begins_thinking(app));
    Message *answer = conversation_add(talk, ASSISTANT, (Bytes){0});
    // Ctrl-C while the text was encoded leaves only some of its ids.
    Ending ending = interrupted ? INTERRUPTED : respond(app, &ids, answer);
    if (ending == INTERRUPTED && answer->ids.n == 0) {
        if (!exit_on_error) notice("chat: stopped before its answer, the message is taken back");
        conversation_drop(talk, talk->n - 2, 2);
    }
    free(ids.p);
    return ending;
}

// Without one final newline, \n or \r\n
static Bytes chop(Bytes text) {
    if (text.n && text.p[text.n - 1] == '\n' && --text.n && text.p[text.n - 1] == '\r') text.n--;
    return text;
}

// The next line of stdin, with its newline. False: the end of input, or Ctrl-C.
static bool read_line(App *app, Bytes *line) {
    Buffer *typed = &app->typed;
    typed->n -= app->line_end;
    if (typed->n) memmove(typed->p, typed->p + app->line_end, typed->n);
    for (size_t seen = 0;; app->line_end = 0) {
        typed->p = grow(typed->p, &typed->cap, typed->n, 65536, 1);
        const Bytes fresh = bytes_from(bytes_of(typed), seen);
        const uint8_t *newline = fresh.n ? memchr(fresh.p, '\n', fresh.n) : NULL;
        app->line_end = newline ? (size_t)(newline - typed->p) + 1 : typed->n;
        *line = (Bytes){typed->p, app->line_end};
        if (newline) return true;
        seen = typed->n;
        ssize_t got = interrupted ? -1 : read_some(STDIN_FILENO, typed->p + typed->n, 65536);
        if (got < 0 && !interrupted) die("stdin: %s", strerror(errno));
        if (got < 0) app->line_end = typed->n;  // what was typed before Ctrl-C is gone
        if (got <= 0) return got == 0 && seen > 0;
        typed->n += got;
        if (typed->n >= INT_MAX) die("stdin: a line is too long, expected less than 2 GB");
    }
}

// A message typed or pasted at a terminal, into app->input. Lines that arrive together are a paste,
// which waits for Enter: at the end of its last line, or, if that line had a newline already, on
// the empty line after it. False: the end of input, or Ctrl-C.
static bool read_message(App *app) {
    Buffer *message = &app->input;
    Bytes line;
    bool cut = false, pasted = false, more = true;
    fputs("> ", stderr);
    for (message->n = 0; more;) {
        if (!read_line(app, &line)) {
            if (interrupted || message->n == 0) return false;
            break;
        }
        cut |= chop(line).n >= (size_t)terminal_line();
        buffer_add(message, line);
        const bool whole = line.p[line.n - 1] == '\n';
        const bool only_enter = whole && line.n == 1;
        const bool continued = whole && line.n > 1 && line.p[line.n - 2] == '\\';
        const bool typed_ahead = app->typed.n > app->line_end;
        const Waiting waits = !whole ? NOTHING : typed_ahead ? LINE : input_waits();
        if (continued) message->n--, message->p[message->n - 1] = '\n';  // without the backslash
        if (only_enter && waits == NOTHING) message->n--;  // it just sends what is there
        more = continued || waits != NOTHING || (whole && pasted);
        if (more && waits == NOTHING && !continued && !cut) fputs("(Enter sends) ", stderr);
        pasted = waits == LINE;
    }
    message->n = cut ? 0 : chop(bytes_of(message)).n;
    if (cut) {
        report("input: the terminal cut a line at %d bytes; nothing was sent", terminal_line());
        notice("input: /file PATH sends a longer text");
    }
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

// Takes the last answer back and draws another; after Ctrl-C before its first token the old one
// stays.
static void retry(App *app) {
    Conversation *talk = &app->conversation;
    if (talk->n < 2 || talk->p[talk->n - 1].role != ASSISTANT) {
        notice("/retry: there is no answer yet");
    } else if (app->engine.sampler.temperature == 0) {
        notice("/retry: -t 0 would draw the same answer again");
    } else {
        const size_t n = talk->n -= 2;
        const Message old[] = {talk->p[n], talk->p[n + 1]};
        chat_turn(app, bytes_of(&old[0].text), false);
        const bool stopped = talk->n == n;
        for (int i = 0; i < 2; i++) {
            if (stopped) conversation_push(talk, old[i]);
            else message_free(&old[i]);
        }
    }
}

// Sends "PATH TEXT" as TEXT, an empty line and the file's text. PATH ends at a space, or is quoted,
// as by many terminals into which a file is dropped; ~/ is $HOME.
static void send_file(App *app, Bytes words) {
    while (words.n && *words.p == ' ') words = bytes_from(words, 1);
    const bool quoted = words.n && (*words.p == '"' || *words.p == '\'');
    const uint8_t end = quoted ? *words.p : ' ';
    if (quoted) words = bytes_from(words, 1);
    Buffer path = {0}, message = {0};
    size_t n = 0;
    while (n < words.n && words.p[n] != end) n++;
    const bool tilde = !quoted && n > 1 && words.p[0] == '~' && words.p[1] == '/';
    const char *home = tilde ? getenv("HOME") : NULL;
    if (home) buffer_add(&path, bytes(home));
    buffer_add(&path, bytes_from((Bytes){words.p, n}, home ? 1 : 0));  // home replaces ~
    path.p[path.n] = 0;
    if (quoted && n < words.n) n++;
    while (n < words.n && words.p[n] == ' ') n++;
    buffer_add(&message, bytes_from(words, n));
    if (message.n) buffer_add(&message, bytes("\n\n"));
    const size_t before = message.n;
    const char *name = (const char *)path.p;
    const char *error = NULL;
    if (path.n == 0) error = "missing, expected /file PATH TEXT";
    else if (file_kind(name) == SPECIAL_FILE || !strcmp(name, "-")) error = "not a regular file";
    else error = file_read(&message, name);
    if (!error && message.n == before) error = "empty, expected a text";
    if (error) report("/file: %s%s%s", name, path.n ? ": " : "", error);
    else chat_turn(app, chop(bytes_of(&message)), false);
    free(path.p);
    free(message.p);
}

typedef enum { MESSAGE, COMMAND, LEAVE } Typed;

// What a line is, after running it if it is a command
static Typed run_command(App *app, Bytes line) {
    const Bytes words = line;
    while (line.n && line.p[line.n - 1] == ' ') line.n--;
    static const char *const leaving[] = {"/bye", "/exit", "/quit", "exit", "quit"};
    for (int i = 0; i < 5; i++) {
        if (bytes_equal(line, bytes(leaving[i]))) return LEAVE;
    }
    if (bytes_equal(line, bytes("/help"))) {
        fputs(commands, stderr);
    } else if (bytes_equal(line, bytes("/retry"))) {
        retry(app);
    } else if (bytes_equal(line, bytes("/clear"))) {
        Conversation *talk = &app->conversation;
        const size_t system = talk->n && talk->p[0].role == SYSTEM;
        conversation_drop(talk, system, talk->n - system);
    } else if (bytes_equal(line, bytes("/file")) ||
               (line.n > 5 && memcmp(line.p, "/file ", 6) == 0)) {
        send_file(app, bytes_from(words, words.n > 5 ? 6 : 5));
    } else {
        return MESSAGE;
    }
    return COMMAND;
}

// A conversation at a terminal
static int run_dialogue(App *app) {
    bool warned = false;
    give_notices(app);
    notice("chat: /help shows the commands.");
    notice("chat: Ctrl-C stops an answer, Ctrl-D leaves.");
    for (;; interrupted = 0) {
        Typed typed = MESSAGE;
        if (read_message(app)) {
            const Bytes text = bytes_of(&app->input);
            if (text.n == 0) continue;
            warned = false;
            if (!memchr(text.p, '\n', text.n)) typed = run_command(app, text);
            if (typed == MESSAGE) chat_turn(app, text, false);
        } else {
            fputc('\n', stderr);
            if (!interrupted) return EXIT_SUCCESS;
            if (warned) return EXIT_INTERRUPT;
            warned = true;
            notice("chat: Ctrl-C again leaves, and so do /bye and Ctrl-D");
        }
        if (typed == LEAVE) return EXIT_SUCCESS;
    }
}

// A conversation with stdin: a terminal, or a script of one turn a line
static int run_conversation(App *app) {
    Bytes line;
    if (is_terminal(STDIN_FILENO)) return run_dialogue(app);
    while (read_line(app, &line)) {
        if (chat_turn(app, chop(line), true) == INTERRUPTED) break;
    }
    return interrupted ? EXIT_INTERRUPT : EXIT_SUCCESS;
}

// ------------------------------------------------------------------------------------------------
// The modes that take a text as it is

// Appends ids, separated by spaces, and a newline.
static void buffer_add_ids(Buffer *b, const Ids *ids) {
    char number[16];
    for (size_t i = 0; i < ids->n; i++) {
        snprintf(number, sizeof(number), i ? " %d" : "%d", ids->p[i]);
        buffer_add(b, bytes(number));
    }
    buffer_add(b, bytes("\n"));
}

// Appends a line: the id, and the token's bytes as a JSON string. What is not UTF-8 is \ufffd.
static void buffer_add_token(Buffer *b, const Tokenizer *tok, int id) {
    const Bytes text = tok->text[id];
    char escape[16];
    snprintf(escape, sizeof(escape), "%d \"", id);
    buffer_add(b, bytes(escape));
    for (size_t at = 0; at < text.n;) {
        const Char c = char_at(tok, text, at);
        const bool control = c.c < ' ' || (c.c >= 127 && c.c < 160);
        if (c.c >= BAD_BYTE) snprintf(escape, sizeof(escape), "\\ufffd");
        else if (control) snprintf(escape, sizeof(escape), "\\u%04x", c.c);
        else snprintf(escape, sizeof(escape), c.c == '"' || c.c == '\\' ? "\\" : "");
        buffer_add(b, bytes(escape));
        if (!control && c.c < BAD_BYTE) buffer_add(b, (Bytes){text.p + at, c.n});
        at += c.n;
    }
    buffer_add(b, bytes("\"\n"));
}

static void run_tokenize(App *app, const Ids *ids) {
    Buffer lines = {0};
    give_notices(app);
    for (size_t i = 0; app->options.verbose && i < ids->n; i++) {
        buffer_add_token(&lines, &app->engine.tokenizer, ids->p[i]);
    }
    if (!app->options.verbose) buffer_add_ids(&lines, ids);
    write_stdout(bytes_of(&lines));
    free(lines.p);
}

// -log of the probability of token id by its logits (n), which are overwritten
static double surprise(float *logits, int n, int id) {
    float max = max_of(logits, n), logit = logits[id];
    likelihoods(logits, n, max, 1);
    return log(sum_double(logits, n)) + max - logit;
}

// Runs ids 0 .. n - 1 from position pos on, and adds the surprises of ids 1 .. n to *sum, one by
// one: batches do not change its last digits.
static void score(Engine *e, const int *ids, int n, int pos, double *sum) {
    const int rows = e->model.state.logit_rows, vocab_size = e->tokenizer.vocab_size;
    float *logits = NULL;
    if (!forward(&e->model, ids, n, pos, n)) progress_end(), exit(EXIT_INTERRUPT);
    for (int i = 0; i < n; i++) {
        if (i % rows == 0) logits = classify(&e->model, i, min_int(rows, n - i));
        *sum += surprise(logits + (size_t)(i % rows) * vocab_size, vocab_size, ids[i + 1]);
    }
}

// A text longer than the context is scored in pieces, each of which begins with the last token of
// the piece before.
static void run_perplexity(App *app, const Ids *ids) {
    Engine *e = &app->engine;
    const int context = e->model.state.seq_len, batch = e->model.state.batch;
    if (ids->n < 2) die("text: too short for a perplexity, expected 2 tokens, found %zu", ids->n);
    if (context < 2) die("context: too short for a perplexity, expected -c 2, found %d", context);
    announce(app, ids);
    if (ids->n > (size_t)context)
        notice("text: %zu tokens are scored in pieces of %d (-c)", ids->n, context);
    const int n = (int)ids->n - 1;
    double sum = 0;
    progress_start(&e->model, 0, n);
    for (int at = 0, count; at < n; at += count) {
        int pos = at % (context - 1);
        count = min_int(min_int(batch, context - 1 - pos), n - at);
        score(e, ids->p + at, count, pos, &sum);
    }
    progress_end();
    double mean = sum / n;
    if (!isfinite(mean)) die(NOT_FINITE);
    char line[128];
    snprintf(line, sizeof(line), "tokens %d nll %.6f ppl %.4f\n", n, mean, exp(mean));
    write_stdout(bytes(line));
}

// The last token's hidden state (dim) after the final norm, L2-normalized, as a JSON array
static void run_embed(App *app, const Ids *ids) {
    Model *m = &app->engine.model;
    const Config *c = &m->config;
    int row = checked_prefill(app, ids);
    if (row < 0) exit(EXIT_INTERRUPT);
    float *h = m->state.workspace[0].h;
    rmsnorm(h, m->state.x + (size_t)row * c->dim, m->weights.rms_final, c->dim, c->rms_norm_eps);
    double squares = 0;
    for (int i = 0; i < c->dim; i++) squares += (double)h[i] * h[i];
    if (!isfinite(squares)) die("model: the vector is not finite; is the file damaged?");
    double length = fmax(sqrt(squares), 1e-12);
    Buffer line = {0};
    char number[32];
    for (int i = 0; i < c->dim; i++) {
        snprintf(number, sizeof(number), "%s%.9g", i ? ", " : "[", h[i] / length);
        buffer_add(&line, bytes(number));
    }
    buffer_add(&line, bytes("]\n"));
    write_stdout(bytes_of(&line));
    free(line.p);
}

// Every mode but chat
static Ending run_raw(App *app, Bytes text) {
    const Tokenizer *tok = &app->engine.tokenizer;
    Ending ending = TURN_ENDED;
    Ids ids = {0};
    Message answer = {0};
    encode_raw(tok, text, &ids);
    if (app->mode == GENERATE && ids.n == 0) ids_add(&ids, tok->end_of_text);
    if (interrupted) ending = INTERRUPTED;  // while the text was encoded
    else if (app->mode == GENERATE) ending = respond(app, &ids, &answer);
    else if (app->mode == TOKENIZE) run_tokenize(app, &ids);
    else if (app->mode == PERPLEXITY) run_perplexity(app, &ids);
    else run_embed(app, &ids);
    free(ids.p);
    free(answer.ids.p);
    free(answer.text.p);
    return ending;
}

// ------------------------------------------------------------------------------------------------
// Options and main: what the command line says, and what it leads to

#define VERSION "1.0"

static const char usage[] =  // after "qwen3 VERSION (SIMD)"
    ": runs Qwen3 language models\n"
    "\n"
    "usage: qwen3 MODEL [options]      MODEL is a .bin file made by export.py\n"
    "\n"
    "  -i TEXT    the prompt; without -i and -f a terminal chats; a pipe is a prompt\n"
    "  -f FILE    the prompt is FILE's text, - is stdin; with -i: TEXT, empty line,\n"
    "             FILE's text\n"
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
    "  -v         also the prompt's ids on stderr; with -m tokenize, a line for each\n"
    "             token\n"
    "  -h, --version\n"
    "\n"
    "A prompt from both: ls -l | qwen3 model.bin -i \"Which file is the largest?\" -f -\n"
    "-m chat on a pipe is a conversation, one turn a line. The model's text goes to\n"
    "stdout, all else to stderr. Exit: 0 success, 1 file, memory or model error,\n"
    "2 usage error, 130 Ctrl-C.\n";

static void print_and_exit(const char *text) {
    char version[64];
    snprintf(version, sizeof(version), "qwen3 " VERSION " (%s)", simd_name());
    write_stdout(bytes(version));
    write_stdout(bytes(text));
    exit(EXIT_SUCCESS);
}

static float parse_float(const char *option, const char *s, float low, float high) {
    char *end;
    float value = strtof(s, &end);
    if (end == s || *end || !(value >= low && value <= high))
        die_usage("%s: bad value, expected %g to %g%s, found \"%s\"", option, low, high,
                  !strcmp(option, "-p") ? " (top-p; a prompt goes with -i)" : "", s);
    return value;
}

static int parse_int(const char *option, const char *s, int low, int high) {
    char *end;
    errno = 0;
    long long value = strtoll(s, &end, 10);
    if (end == s || *end || errno || value < low || value > high)
        die_usage("%s: bad value, expected %d to %d, found \"%s\"", option, low, high, s);
    return (int)value;
}

static uint64_t parse_seed(const char *s) {
    char *end;
    errno = 0;
    uint64_t value = *s == '-' ? (uint64_t)strtoll(s, &end, 10) : strtoull(s, &end, 10);
    if (end == s || *end || errno)
        die_usage("-s: bad value, expected a 64-bit integer, found \"%s\"", s);
    return value;
}

static int parse_mode(const char *s) {
    for (int i = 0; i < N_MODES; i++) {
        if (!strcmp(s, mode_names[i])) return i;
    }
    die_usage("-m: unknown mode, expected chat, generate, embed, tokenize or perplexity, "
              "found \"%s\"", s);
}

#define OPTION_LETTERS "ifmyrtpkaexsncbj"  // of options with a value

static void parse_option(Options *o, const char *option, const char *value) {
    switch (option[1]) {
    case 'i': o->text = value; break;
    case 'f': o->file = value; break;
    case 'y': o->system = value; break;
    case 'm': o->mode = parse_mode(value); break;
    case 'r': o->think = parse_int(option, value, 0, 1); break;
    case 't': o->temperature = parse_float(option, value, 0, 1000); break;
    case 'p': o->top_p = parse_float(option, value, 1e-30f, 1); break;
    case 'k': o->top_k = parse_int(option, value, 0, INT_MAX); break;
    case 'a': o->presence = parse_float(option, value, 0, 2); break;
    case 'e': o->repetition = parse_float(option, value, 0.01f, 100); break;
    case 'x': o->stop = value; break;
    case 'n': o->n = parse_int(option, value, -1, INT_MAX); break;
    case 'c': o->context = parse_int(option, value, 0, INT_MAX); break;
    case 'b': o->batch = parse_int(option, value, 1, 512); break;
    case 'j': o->threads = parse_int(option, value, 1, 1024); break;
    case 's': o->seed = parse_seed(value); break;
    }
}

// Ends the program because of an argument that is neither an option nor MODEL, and names the
// likely mistake. o: the options before it
static void die_of_argument(const char *arg, const Options *o) {
    static const char *const other[][2] = {
        {"--prompt", "-i"}, {"--file", "-f"}, {"--system-prompt", "-y"}, {"--system", "-y"},
        {"--temp", "-t"}, {"--temperature", "-t"}, {"--top-p", "-p"}, {"--top-k", "-k"},
        {"--seed", "-s"}, {"--n-predict", "-n"}, {"--predict", "-n"}, {"--ctx-size", "-c"},
        {"--threads", "-j"}, {"--model", "MODEL without an option"}};
    const size_t n = strcspn(arg, "=");
    for (size_t i = 0; i < sizeof(other) / sizeof(*other); i++) {
        if (strlen(other[i][0]) == n && !strncmp(arg, other[i][0], n))
            die_usage("%s: unknown option, expected %s; -h lists all", arg, other[i][1]);
    }
    if (arg[0] == '-' && arg[1] && strchr(OPTION_LETTERS, arg[1]) && isdigit((uint8_t)arg[2]))
        die_usage("%s: unknown option, expected a space: %.2s %s", arg, arg, arg + 2);
    if (arg[0] == '-') die_usage("%s: unknown option, expected one of those that -h lists", arg);
    if (o->text)
        die_usage("%s: unexpected; a prompt of several words needs quotes: -i \"%s %s\"", arg,
                  o->text, arg);
    die_usage("%s: unexpected, as MODEL is \"%s\"; a prompt goes with -i: -i \"%s\"", arg, o->model,
              arg);
}

// Only chat and generate can begin without a text.
static void check_text(const Options *o, int mode) {
    if (mode > GENERATE && !o->text && !o->file && is_terminal(STDIN_FILENO))
        die_usage("-m %s: no text, expected -i TEXT, -f FILE or a pipe", mode_names[mode]);
}

static Options parse_options(int argc, char **argv) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    Options o = {.mode = -1, .think = -1, .temperature = -1, .top_p = -1, .top_k = -1, .n = -1,
                 .repetition = -1, .context = -1, .batch = 512, .threads = -1,
                 .seed = ((uint64_t)time.tv_sec * 1000000000u + time.tv_nsec) / 1000 % 1000000};
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (!strcmp(arg, "-h") || !strcmp(arg, "--help")) {
            print_and_exit(usage);
        } else if (!strcmp(arg, "--version")) {
            print_and_exit("\n");
        } else if (!strcmp(arg, "-q")) {
            quiet = true;
        } else if (!strcmp(arg, "-v")) {
            o.verbose = true;
        } else if (arg[0] == '-' && arg[1] && !arg[2] && strchr(OPTION_LETTERS, arg[1])) {
            if (++i == argc) die_usage("%s: value missing, expected one after it", arg);
            parse_option(&o, arg, argv[i]);
        } else if (arg[0] == '-' || o.model) {
            die_of_argument(arg, &o);
        } else {
            o.model = arg;
        }
    }
    if (!o.model) die_usage("MODEL: missing, expected a .bin file; -h shows more");
    if (quiet && o.verbose) die_usage("-q, -v: both given, expected one of them");
    if (o.file && !*o.file) die_usage("-f: bad value, expected a file's name, or - for stdin");
    if (o.stop && !*o.stop) die_usage("-x: bad value, expected a text that is not empty");
    check_text(&o, o.mode);
    return o;
}

// Reads the prompt from -i, -f or stdin. False: there is none, this is a conversation.
static bool read_prompt(App *app) {
    const Options *o = &app->options;
    Buffer *text = &app->input;
    const bool terminal = is_terminal(STDIN_FILENO), chat = app->mode == CHAT;
    check_text(o, app->mode);
    if (o->text) buffer_add(text, bytes(o->text));
    if (o->text && o->file) buffer_add(text, bytes("\n\n"));
    if (!o->text && !o->file) {
        if (o->mode == CHAT || (chat && terminal)) return false;
        if (terminal) return true;  // generate from nothing
    }
    if (!o->text || o->file) {
        const char *file = o->file ? o->file : "-", *name = strcmp(file, "-") ? file : "stdin";
        const size_t before = text->n;
        const char *error = file_read(text, file);
        if (error) die("%s: %s", name, error);
        if (chat && text->n == before && !strcmp(file, "-"))
            die("stdin: empty, expected a prompt; has a command before the pipe failed?");
        if (chat) text->n = before + chop(bytes_from(bytes_of(text), before)).n;
    }
    return true;
}

// Thinking, and the sampling advice that depends on it
static void choose_chat(App *app) {
    Tokenizer *tok = &app->engine.tokenizer;
    bool can_switch = !bytes_equal(tok->chat.answer[0], tok->chat.answer[1]);
    app->think = can_switch && app->options.think == 1;
    app->no_switch = app->options.think >= 0 && !can_switch;
    // Qwen's advice for answers without thinking, unless the checkpoint asks for greedy ones
    if (can_switch && !app->think && tok->temperature != 0) {
        tok->temperature = 0.7f;
        tok->top_p = 0.8f;
        tok->top_k = 20;
    }
}

static void choose_sampling(App *app) {
    const Options *o = &app->options;
    const Tokenizer *tok = &app->engine.tokenizer;
    app->engine.sampler = (Sampler){
        .temperature = o->temperature >= 0 ? o->temperature : tok->temperature,
        .top_p = o->top_p >= 0 ? o->top_p : tok->top_p,
        .top_k = o->top_k >= 0 ? o->top_k : tok->top_k,
        .presence = o->presence,
        .repetition = o->repetition >= 0 ? o->repetition : tok->repetition,
        .rng = o->seed,
        .answered = alloc(tok->vocab_size, sizeof(bool), "the sampler"),
        .seen = alloc(tok->vocab_size, sizeof(bool), "the sampler"),
    };
}

// Ends the program if MODEL is a directory or missing. People also try the name of a model on the
// Hugging Face hub (OWNER/NAME): then the message says what to do.
static void check_model_path(const char *path) {
    const char *slash = strchr(path, '/'), *end = strrchr(path, '.');
    const bool made = end && (!strcmp(end, ".bin") || !strcmp(end, ".gguf"));
    const FileKind kind = file_kind(path);
    if (kind == DIRECTORY)
        die("%s: a directory, expected a .bin file, which this makes: export.py %s", path, path);
    const bool hub_name = slash && !strchr(slash + 1, '/') && !made && !strchr("./~", *path);
    if (kind == NO_FILE && hub_name)
        die("%s: not a file, expected a .bin file; for a model on the hub: export.py %s", path,
            path);
    if (kind == NO_FILE)
        die("%s: %s, expected a .bin file made by export.py", path, strerror(errno));
}

static void load(App *app) {
    const Options *o = &app->options;
    Engine *e = &app->engine;
    const Config *c = &e->model.config;
    char tokenizer[4096];
    check_model_path(o->model);
    model_map(&e->model, o->model);
    snprintf(tokenizer, sizeof(tokenizer), "%s.tokenizer", o->model);
    if (file_kind(tokenizer) == NO_FILE)
        die("%s: missing, expected beside the model, where export.py writes it", tokenizer);
    tokenizer_load(&e->tokenizer, tokenizer, c->vocab_size);
    app->mode = o->mode < 0 ? e->tokenizer.mode : (Mode)o->mode;
    int context = o->context > 0 ? o->context : c->max_seq_len;
    if (o->context < 0) context = min_int(4096, c->max_seq_len);
    if (context > c->max_seq_len)
        die("-c: beyond the model, expected at most %d (export.py --yarn stretches it), found %d",
            c->max_seq_len, context);
    if (app->mode == TOKENIZE) return;
    start_threads(o->threads > 0 ? o->threads : cpu_count());
    enum { SCORED_ROWS = 16 };  // so many rows share one reading of the classifier's weights
    int logit_rows = app->mode == PERPLEXITY ? SCORED_ROWS
                     : app->mode == EMBED ? 0 : 2 * draft_rows();
    int batch = min_int(o->batch, context);
    state_init(&e->model, context, batch, min_int(logit_rows, batch));
    e->cached.p = alloc((size_t)context + 1, sizeof(int), "the prompt");
    e->max_new = o->n;
}

static void writer_init(App *app) {
    const bool terminal = is_terminal(STDOUT_FILENO);
    const char *stop = app->options.stop;
    app->writer = (Writer){.chat = app->mode == CHAT, .terminal = terminal, .began = true,
                           .dim = terminal && !getenv("NO_COLOR"),
                           .stop = stop ? bytes(stop) : (Bytes){0}};
    Buffer *held = &app->writer.held, *shown = &app->writer.shown;
    held->p = grow(held->p, &held->cap, 0, 1024, 1);  // decoding allocates nothing
    shown->p = grow(shown->p, &shown->cap, 0, 4096, 1);
    app->engine.writer = &app->writer;
}

static int run(App *app) {
    const Options *o = &app->options;
    load(app);
    const bool chat = app->mode == CHAT;
    if (chat) choose_chat(app);
    choose_sampling(app);
    writer_init(app);
    if (chat && o->system) conversation_add(&app->conversation, SYSTEM, bytes(o->system));
    const bool single = read_prompt(app);
    stoppable = app->mode != TOKENIZE;
    if (!single) return run_conversation(app);
    Bytes text = bytes_of(&app->input);
    Ending ending = chat ? chat_turn(app, text, true) : run_raw(app, text);
    return ending == INTERRUPTED ? EXIT_INTERRUPT : EXIT_SUCCESS;
}

#ifndef TEST
int main(int argc, char **argv) {
    static App app;
    start_platform(&argc, &argv);
    app.options = parse_options(argc, argv);
    catch_signals();
    return run(&app);
}
#endif

// ================================================================================================
// PART III. THE MACHINE
// ================================================================================================

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/stat.h>
#ifndef NO_THREADS
#include <pthread.h>
#endif
#ifdef _WIN32
#include <windows.h>
#else
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <termios.h>
#endif
#ifdef __APPLE__
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/syscall.h>
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// ------------------------------------------------------------------------------------------------
// Threads: a pool that runs one loop at a time. An idle worker spins for a moment and then sleeps,
// so that it takes no CPU time from other programs. Who takes which share varies; the results do
// not.

static int n_threads = 1;

INLINE int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

#ifdef NO_THREADS
static void start_threads(int count) { (void)count; }

static void parallel(Job job, void *arg, int count, int chunk) {
    (void)chunk;
    job(arg, 0, count, 0);
}
#else
enum { SPINS = 2000 };

static struct {
    _Atomic uint64_t ticket;  // number of the loop << 32 | items that nobody has taken yet
    _Atomic int finished;     // items that are done
    _Atomic(Job) job;
    void *_Atomic arg;
    _Atomic int count, chunk;
    _Atomic int sleepers;  // threads that wait for `wake` or `done`; changed while `lock` is held
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static bool has_work(void) { return (uint32_t)atomic_load(&pool.ticket) > 0; }

static bool is_done(void) { return atomic_load(&pool.finished) == atomic_load(&pool.count); }

INLINE void cpu_pause(void) {  // tells the core that it is spinning
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Spins, then sleeps. No wake-up is lost: a waker first makes ready() true and then looks for
// sleepers; a sleeper first counts itself and then tests ready().
static void wait_until(bool (*ready)(void), pthread_cond_t *cond) {
    for (int i = 0; i < SPINS; i++) {
        if (ready()) return;
        cpu_pause();
    }
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleepers, 1);
    while (!ready()) pthread_cond_wait(cond, &pool.lock);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.lock);
}

static void wake_up(pthread_cond_t *cond) {
    if (atomic_load(&pool.sleepers) == 0) return;
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(cond);
    pthread_mutex_unlock(&pool.lock);
}

// Takes shares of the current loop until none is left. Guided scheduling: a share is 7/8 of what a
// thread would get if all took the same, so shares become smaller and all threads end together.
// Job, arg, count and chunk are read before the exchange. parallel() stores new ones only when all
// items of a loop are done, and then the loop's number changes, which makes the exchange fail. So
// after a successful exchange they are those of this loop.
static void work(int thread) {
    uint64_t ticket = atomic_load(&pool.ticket);
    while ((uint32_t)ticket > 0) {
        Job job = atomic_load(&pool.job);
        void *arg = atomic_load(&pool.arg);
        int count = atomic_load(&pool.count), chunk = atomic_load(&pool.chunk);
        int left = (int)(uint32_t)ticket, begin = count - left;
        int share = min_int(round_up(max_int(left * 7 / (8 * n_threads), 1), chunk), left);
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket - share)) continue;
        job(arg, begin, begin + share, thread);
        if (atomic_fetch_add(&pool.finished, share) + share == count) wake_up(&pool.done);
        ticket = atomic_load(&pool.ticket);
    }
}

static void *worker(void *arg) {
    for (;;) {
        wait_until(has_work, &pool.wake);
        work((int)(intptr_t)arg);
    }
    return NULL;
}

static void start_threads(int count) {
    for (; n_threads < count; n_threads++) {
        pthread_t thread;
        int error = pthread_create(&thread, NULL, worker, (void *)(intptr_t)n_threads);
        if (error) die("thread %d of %d: %s; -j sets their number", n_threads + 1, count,
                       strerror(error));
        pthread_detach(thread);
    }
}

static void parallel(Job job, void *arg, int count, int chunk) {
    if (n_threads == 1 || count <= chunk) {
        job(arg, 0, count, 0);
        return;
    }
    atomic_store(&pool.job, job);
    atomic_store(&pool.arg, arg);
    atomic_store(&pool.count, count);
    atomic_store(&pool.chunk, chunk);
    atomic_store(&pool.finished, 0);
    atomic_store(&pool.ticket, ((atomic_load(&pool.ticket) >> 32) + 1) << 32 | (uint32_t)count);
    wake_up(&pool.wake);
    work(0);
    wait_until(is_done, &pool.done);
}
#endif

// ------------------------------------------------------------------------------------------------
// SIMD primitives: a new instruction set provides these constants and functions. Elsewhere, only
// cpu_pause, choose_streams and the products that use AMX know the CPU, and mul_add in Part I,
// which must be fused exactly where mul_add_v is. A vector is LANES floats or int32s, LANES is
// 4, 8 or 16 (an extension of GCC and clang: + - * and so on work lane by lane).
//
//   dot4(acc, w, x)      acc + the sum of 4 products of bytes of w and x, in each lane
//   mul_add_v(a, b, c)   mul_add in each lane
//   zip_low, zip_high    a0 b0 a1 b1 ... of the first, or of the second, halves of a and b
//   add_pairs(a, b)      a0 + a1, a2 + a3, ..., b0 + b1, b2 + b3, ...
//   pick_levels(t, n)    for each byte of n, byte n % 16 of t, which holds the same 16 bytes again
//                        and again
//   load_bytes(p, n)     n bytes from p on, then zeros
//   load_halves(p, n)    n floats of 16 bits from p on, then zeros
//
// Quantized x lies in -127 .. 127, so no partial sum overflows, even if a file's w holds -128. Some
// instructions take w as unsigned bytes: there W_BIAS = 128 is added to w, and bias_fix, which is
// -128 sum(x), to the sum: (w + 128) . x = w . x + 128 sum(x).
//
// A tile of a matrix product is TILE_VECS vectors of rows by TILE_TOKENS tokens, as many as fit
// into the registers. If HAVE_DOT4 is 0, dot4 is slow and matmul_plain is used. AMX, the matrix
// unit of Intel's servers, has tiles of one vector of rows by AMX_TOKENS tokens.

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__FMA__)
#define USE_AVX512
#define SIMD "AVX-512 VNNI"
enum { LANES = 16, TILE_VECS = 2, TILE_TOKENS = 6, W_BIAS = 128, HAVE_DOT4 = 1 };
#elif defined(__AVX2__) && defined(__FMA__)
#define USE_AVX2
#ifdef __AVXVNNI__
#define SIMD "AVX-VNNI"
enum { LANES = 8, TILE_VECS = 1, TILE_TOKENS = 6, W_BIAS = 128, HAVE_DOT4 = 1 };
#else
#define SIMD "AVX2"
enum { LANES = 8, TILE_VECS = 1, TILE_TOKENS = 4, W_BIAS = 0, HAVE_DOT4 = 1 };
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
#define USE_NEON
#define SIMD "NEON dotprod"
enum { LANES = 4, TILE_VECS = 2, TILE_TOKENS = 6, W_BIAS = 0, HAVE_DOT4 = 1 };
#else
#define SIMD "plain C"
enum { LANES = 4, TILE_VECS = 2, TILE_TOKENS = 2, W_BIAS = 0, HAVE_DOT4 = 0 };
#endif

#if defined(USE_AVX512) && defined(__x86_64__) && defined(__linux__) && \
    (defined(__AMX_INT8__) || defined(__AMXINT8__))  // the second by clang before 16
#define USE_AMX
#endif

enum { PANEL_ROWS = TILE_VECS * LANES };
enum { AMX_TOKENS = 16, MOST_TILE_TOKENS = AMX_TOKENS };  // the most of all builds
enum { FLIP = W_BIAS ? (int32_t)0x80808080 : 0 };  // ^ FLIP adds W_BIAS to each byte

// Placed before loops over arrays of vectors, so that the arrays stay in registers. UNROLL_GCC is
// for loops whose number of rounds may not be a constant; clang would warn that it can't unroll.
#if defined(NO_UNROLL)  // with sanitizers, unrolled code takes minutes to compile
#define UNROLL
#define UNROLL_GCC
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_GCC
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_GCC UNROLL
#endif

typedef float VecF __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t VecI __attribute__((vector_size(4 * LANES), may_alias));

// The portable versions: tests/test holds the others to them (mul_add_v but for its rounding).
INLINE VecI dot4_plain(VecI acc, VecI w, VecI x) {
    const uint8_t *wb = (const uint8_t *)&w;
    const int8_t *xb = (const int8_t *)&x;
    for (int i = 0; i < 4 * LANES; i++) {
        acc[i / 4] += (W_BIAS ? wb[i] : (int8_t)wb[i]) * xb[i];
    }
    return acc;
}

INLINE VecF mul_add_plain(VecF a, VecF b, VecF c) { return a * b + c; }

INLINE VecI add_pairs_plain(VecI a, VecI b) {
    VecI sums = {0};
    for (int i = 0; i < LANES / 2; i++) {
        sums[i] = a[2 * i] + a[2 * i + 1];
        sums[LANES / 2 + i] = b[2 * i] + b[2 * i + 1];
    }
    return sums;
}

INLINE VecI pick_levels_plain(VecI table, VecI n) {
    VecI result = {0};
    for (size_t i = 0; i < sizeof(n); i++) {
        ((uint8_t *)&result)[i] = ((uint8_t *)&table)[((uint8_t *)&n)[i] % 16];
    }
    return result;
}

#if defined(USE_AVX512)
INLINE VecI dot4(VecI acc, VecI w, VecI x) {
    return (VecI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}
INLINE VecF mul_add_v(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
INLINE VecI pick_levels(VecI table, VecI n) {
#ifdef __AVX512VBMI__  // uses 6 bits of n, and the table of 64 bytes is four times the same
    return (VecI)_mm512_permutexvar_epi8((__m512i)n, (__m512i)table);
#else
    return (VecI)_mm512_shuffle_epi8((__m512i)table, (__m512i)n & _mm512_set1_epi8(15));
#endif
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
#define dot4 dot4_plain
#define mul_add_v mul_add_plain
#define pick_levels pick_levels_plain
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
#elif defined(USE_NEON)
INLINE VecI add_pairs(VecI a, VecI b) { return (VecI)vpaddq_s32((int32x4_t)a, (int32x4_t)b); }
#else
#define add_pairs add_pairs_plain
#endif

#ifdef USE_AMX
static bool has_amx;  // the CPU has AMX, and Linux lets this process use it

// Linux lets a process use AMX only after it has asked. Like catch_unknown_instructions, this runs
// before main and is one call only.
__attribute__((constructor)) static void ask_for_amx(void) {
    has_amx = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILE_DATA
}

// Sets the shapes of this thread's AMX registers, as (rows, bytes of a row): 0, the sums, is
// (AMX_TOKENS, 4 * LANES), 1, of x, is (AMX_TOKENS, n), and 2, of w, is (n / 4, 4 * LANES). n is
// 64, or 32 if group is 32.
static void amx_shapes(int group) {
    static const struct {
        uint8_t palette, unused[15];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } of_32 = {1, {0}, {64, 32, 64}, {16, 16, 8}}, of_64 = {1, {0}, {64, 64, 64}, {16, 16, 16}};
    _tile_loadconfig(group == 32 ? &of_32 : &of_64);
}

// Multiplies a group of LANES rows with the same group of AMX_TOKENS tokens: lane r of dots[i]
// becomes the dot product of row r and token i. w[j * w_stride] holds bytes 4j .. 4j + 3 of each
// row's group; token i's group begins at x + i * x_bytes.
INLINE void amx_dots(VecI *dots, const VecI *w, int w_stride, const int8_t *x, size_t x_bytes,
                     const int group) {
    __asm__ volatile("" ::: "memory");  // GCC doesn't know that _tile_loadd reads memory
    _tile_zero(0);
    for (int k = 0; k < group; k += 64, x += 64, w += 16 * w_stride) {
        _tile_loadd(1, x, x_bytes);  // before GCC 12.3, a macro without parentheses
        _tile_loadd(2, w, w_stride * sizeof(*w));
        _tile_dpbssd(0, 1, 2);
    }
    _tile_stored(0, dots, sizeof(*dots));
}
#else  // The calls of amx_shapes and matmul_amx have to compile, but are never reached.
enum { has_amx = false };
#define amx_shapes(group) ((void)(group))
#define matmul_amx matmul_tile
#endif

static const char *simd_name(void) { return has_amx ? SIMD " and AMX" : SIMD; }

INLINE VecI splat(int32_t value) { return (VecI){0} + value; }

INLINE VecF splat_f(float value) { return value - (VecF){0}; }  // -0 + 0 would lose the sign

INLINE VecI load_bytes(const void *p, const int n) {  // n <= 4 * LANES bytes, then zeros
#ifdef USE_AVX512
    return (VecI)_mm512_maskz_loadu_epi8(~0ull >> (64 - n), p);
#else
    VecI value = {0};
    memcpy(&value, p, n);
    return value;
#endif
}

INLINE VecF load_halves(const uint16_t *p, const int n) {  // n <= LANES half_floats, then zeros
#ifdef USE_AVX512
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((1u << n) - 1, p));
#else
    uint16_t halves[8] = {0};
    memcpy(halves, p, n * sizeof(*p));
#if defined(USE_AVX2) && defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((__m128i *)halves));
#elif defined(USE_NEON)
    return (VecF)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
#else
    VecF value = {0};
    for (int i = 0; i < LANES; i++) value[i] = half_float(halves[i]);
    return value;
#endif
#endif
}

// ------------------------------------------------------------------------------------------------
// Matrix products: out = x W^T, as dot_row defines each element. A term is a group's exact dot
// product times the weights' scale; an element is the sum of its terms, each times x's scale.
// For one token or a few (few_tokens), reading the weights takes the time: matvec reads blocks of
// LANES rows, and adds the terms of a block with a row in each lane. A larger batch is bound by
// arithmetic: a panel of PANEL_ROWS rows is transposed and multiplied with all tokens, tile by
// tile, by matmul_tile or matmul_amx. If HAVE_DOT4 is 0, matmul_plain does all. Where branches of
// an `if` make the same call, some pass a constant, so that the compiler can unroll.

// Transposes LANES rows of `words`, a (rows, cols) array of 4-byte words: lane r of out[i * stride]
// is word i of row `row` + r, ^ flip. Past the end the last row is repeated; its results are
// discarded.
INLINE void transpose_rows(VecI *out, int stride, const void *words, int rows, int cols, int row,
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

// Transposed nibbles, (cols / 8) vectors of 4 bytes a lane, become (cols / 4) vectors of levels, in
// place. Backwards, because vector j writes only to places from j on.
INLINE void expand_nibbles(VecI *wq, int stride, int cols, VecI levels, const int group) {
    const int half = group / 8;  // vectors of half a group
    for (int j = cols / 8 - 1; j >= 0; j--) {
        const VecI nibbles = wq[j * stride];
        const int low = j + j / half * half;
        wq[(low + half) * stride] = pick_levels(levels, nibbles >> 4);
        wq[low * stride] = pick_levels(levels, nibbles);
    }
}

INLINE VecI level_table(const int8_t *levels, int32_t flip) {  // for pick_levels, ^ flip
    VecI table = {0};
    for (size_t i = 0; i < sizeof(table); i += 16) memcpy((char *)&table + i, levels, 16);
    return table ^ splat(flip);
}

// Lane i becomes the sum of lanes i * n .. i * n + n - 1 of the n vectors of a, laid end to end.
INLINE VecI sum_each(VecI *a, const int n) {
    UNROLL for (int left = n / 2; left > 0; left /= 2) {
        UNROLL for (int i = 0; i < left; i++) a[i] = add_pairs(a[2 * i], a[2 * i + 1]);
    }
    return a[0];
}

// Where W[row] . x[t] goes
INLINE float *out_at(const Matmul *part, int t, int row) {
    return part->out + (size_t)t * part->stride + row - part->row_begin;
}

// Stores values, W[r] . x[t] for `count` rows r from `row` on, or adds them to what is there.
INLINE void put_rows(const Matmul *part, int t, int row, const float *values, const int count) {
    float *out = out_at(part, t, row), sum[PANEL_ROWS];
    if (part->add) {
        memcpy(sum, out, count * sizeof(float));
        for (int i = 0; i < count; i++) sum[i] += values[i];
        values = sum;
    }
    memcpy(out, values, count * sizeof(float));
}

// matvec works in rounds of n_streams blocks of LANES rows. It reads a round's blocks side by side:
// the first row of each, then the second of each, and so on. Four streams are faster than one on
// Intel's Sapphire Rapids; on AMD's Zen 5, one is 1.2 times as fast as four. All AMD CPUs get one.
// The CPU prefetches each stream, but only within 4 KB, so matvec prefetches, too: weights
// bytes_ahead() bytes ahead of the current ones, scales SCALES_AHEAD scales ahead.
enum { MOST_STREAMS = 4, SCALES_AHEAD = 64 };
static int n_streams = MOST_STREAMS;

// The best found: for one stream 113 cache lines, 8 bits or 4; for each of four, 33 lines of 8-bit
// weights, half as many of 4-bit ones
INLINE int bytes_ahead(const int bits, const int streams) {
    return streams == 1 ? 7232 : 264 * bits;
}

// read_once: one token on an AMD CPU. For several, the rows are in the cache after the first one.
//
// Where physical memory places matvec's instructions changes Zen 5's speed by up to 10 %, most
// likely because the weights drive them out of L2, and so out of L1. Locality 0, to L1 alone,
// avoids that. (The argument has to be a constant.) And with 8 bits, Zen 5 is 1.08 times as fast if
// fewer loads wait for memory at the same time: with AVX-512, nops fill its window instead.
INLINE void prefetch_weights(const uint8_t *w, const int bits, const bool read_once) {
    if (read_once) __builtin_prefetch(w, 0, 0);
    else __builtin_prefetch(w);
    if (read_once && bits == 8 && LANES == 16) __asm__ volatile(".rept 16\n nop\n .endr");
}

#ifdef __x86_64__
// Before main; no instruction that a CPU may lack: see catch_unknown_instructions.
__attribute__((constructor)) static void choose_streams(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd")) n_streams = 1;
}
#endif

typedef struct {               // a row of a matrix and the vector x, from some group on
    const uint8_t *w;          // q or nibbles
    const void *w_scale;       // scale or half_scale
    const int8_t *low, *high;  // 8 bits: x.q. 4 bits: first and second halves of its groups
    const int32_t *bias_fix;   // of x
    size_t ahead;              // bytes from w to the weights to prefetch
} RowTimesVector;

// terms[g] = (float)(w_g . x_g) * w_scale[g] for the first count <= LANES groups g. dots[v] holds
// partial sums of one group, or side by side those of several that are smaller than a vector; then
// sum_each makes one lane of each group.
INLINE void group_terms(float *terms, const RowTimesVector *a, VecI levels, const int count,
                        const int group, const int bits, const bool read_once) {
    const int size = group * bits / 8, step = 4 * LANES;  // bytes of a group, and of a vector
    const int share = max_int(size, step), n = count * size;  // bytes of a dots[v], and in all
    VecI dots[LANES];
    if (bits == 8) __builtin_prefetch((const float *)a->w_scale + SCALES_AHEAD);
    else __builtin_prefetch((const uint16_t *)a->w_scale + SCALES_AHEAD);
    UNROLL_GCC for (int v = 0; v < LANES * size / share; v++) {
        VecI dot = splat(0);
        UNROLL for (int part = 0; part < share; part += step) {
            const int i = v * share + part, have = min_int(step, n - i);
            if (i >= n) continue;
            const VecI w = load_bytes(a->w + i, have);
            if (i % 64 == 0) prefetch_weights(a->w + i + a->ahead, bits, read_once);
            if (bits == 8) {
                dot = dot4(dot, w ^ splat(FLIP), load_bytes(a->low + i, have));
            } else {
                dot = dot4(dot, pick_levels(levels, w), load_bytes(a->low + i, have));
                dot = dot4(dot, pick_levels(levels, w >> 4), load_bytes(a->high + i, have));
            }
        }
        dots[v] = dot;
        // No instruction: it keeps GCC from moving all prefetches to the front. Zen 5 drops those
        // that come in a burst.
        __asm__ volatile("");
    }
    VecI sums = sum_each(dots, LANES * size / share);
    if (W_BIAS) sums += load_bytes(a->bias_fix, count * sizeof(int32_t));
    VecF scales = bits == 8 ? (VecF)load_bytes(a->w_scale, count * sizeof(float))
                            : load_halves(a->w_scale, count);
    VecF values = __builtin_convertvector(sums, VecF) * scales;
    memcpy(terms, &values, count * sizeof(float));
}

// Copies x (n) so that the first halves of all groups come first, then the second halves: in the
// order in which a vector of nibbles meets them.
INLINE void split_groups(int8_t *out, const int8_t *x, int n, const int group) {
    for (int i = 0; i < n; i += group) {
        memcpy(out + i / 2, x + i, group / 2);
        memcpy(out + (n + i) / 2, x + i + group / 2, group / 2);
    }
}

// One token, up to streams * LANES rows from `row` on: computes the terms of all rows. Then it
// transposes those of LANES rows at a time and adds them, a row in each lane. If the last block has
// fewer rows, the other lanes hold what was in the buffer, and put_rows leaves them out.
INLINE void matvec(const Matmul *part, const Workspace *own, int t, int row, const int group,
                   const int bits, const int streams, const bool read_once) {
    const Matrix *w = part->w;
    const int cols = w->cols, n_groups = cols / group;
    const int rows = min_int(streams * LANES, part->row_end - row);
    const size_t row_bytes = (size_t)cols * bits / 8, block_bytes = LANES * row_bytes;
    const Quantized x = quantized_row(part->x, t);
    const VecI levels = bits == 4 ? level_table(w->levels, FLIP) : splat(0);
    VecF *const columns = own->panel;                    // (n_groups) of LANES rows
    float *const terms = (float *)(columns + n_groups);  // (streams * LANES, n_groups)
    int8_t *const splits = (int8_t *)(terms + streams * LANES * n_groups);  // (n_tokens, cols)
    int8_t *const split = splits + (t - part->token_begin) * cols;
    // The first round splits x; the later ones find it there.
    if (bits == 4 && row == part->row_begin) split_groups(split, x.q, cols, group);
    for (int i = 0; i < LANES; i++) {  // row i of each block
        for (int r = i; r < rows; r += LANES) {
            const size_t first = (size_t)(row + r) * n_groups;
            for (int g = 0; g < n_groups; g += LANES) {
                const size_t at = i * row_bytes + (size_t)g * group * bits / 8;  // in the block
                size_t ahead = bytes_ahead(bits, streams);
                // After the block, the stream goes on in the next round's block.
                if (at + ahead >= block_bytes) ahead += (streams - 1) * block_bytes;
                const RowTimesVector a = bits == 8
                    ? (RowTimesVector){(const uint8_t *)w->q + (first + g) * group,
                                       w->scale + first + g, x.q + g * group, NULL,
                                       x.bias_fix + g, ahead}
                    : (RowTimesVector){w->nibbles + (first + g) * (group / 2),
                                       w->half_scale + first + g, split + g * (group / 2),
                                       split + (n_groups + g) * (group / 2), x.bias_fix + g, ahead};
                float *const to = terms + r * n_groups + g;
                // Half a vector at a row's end is common: 30B-A3B's w2 has 24 groups for 16 lanes.
                const int count = min_int(LANES, n_groups - g), half = LANES / 2;
                if (count == LANES) group_terms(to, &a, levels, LANES, group, bits, read_once);
                else if (count == half) group_terms(to, &a, levels, half, group, bits, read_once);
                else group_terms(to, &a, levels, count, group, bits, read_once);
            }
        }
    }
    for (int r = 0; r < rows; r += LANES) {
        VecF sum = {0};
        transpose_rows((VecI *)columns, 1, terms + r * n_groups, LANES, n_groups, 0, 0);
        for (int g = 0; g < n_groups; g++) sum = mul_add_v(columns[g], splat_f(x.scale[g]), sum);
        put_rows(part, t, row + r, (float *)&sum, min_int(LANES, rows - r));
    }
}

// matvec with n_streams as a constant, which makes it 1.2 times as fast on a few tokens
INLINE void matvec_here(const Matmul *part, const Workspace *own, int t, int row, const int group,
                        const int bits) {
    const bool one_token = part->token_end - part->token_begin == 1;
    if (n_streams != 1) matvec(part, own, t, row, group, bits, MOST_STREAMS, false);
    else if (one_token) matvec(part, own, t, row, group, bits, 1, true);
    else matvec(part, own, t, row, group, bits, 1, false);
}

// Multiplies PANEL_ROWS rows from `row` on with TILE_TOKENS tokens from t on. wq (cols / 4,
// TILE_VECS) and w_scale (n_groups, TILE_VECS) are the transposed rows. Rows of x from token_end on
// may hold anything; their results are discarded.
INLINE void matmul_tile(const Matmul *part, int t, int row, const VecI *wq, const VecF *w_scale,
                        const int group) {
    const int n_groups = part->w->cols / group, rows = min_int(PANEL_ROWS, part->row_end - row);
    const size_t stride = part->x->stride;
    const Quantized x = quantized_row(part->x, t);
    const int8_t *xq = x.q;
    VecF acc[TILE_TOKENS][TILE_VECS] = {0};
    // What is added to is prefetched: rows of out, 4 KB apart in the 0.6B, share a few sets of a
    // cache, so that they leave it early.
    for (int i = 0; part->add && i < min_int(TILE_TOKENS, part->token_end - t); i++) {
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
                VecI four = splat(load_i32(xq + i * stride * 4));
                UNROLL for (int v = 0; v < TILE_VECS; v++) {
                    sum[i][v] = dot4(sum[i][v], wq[v], four);
                }
            }
        }
        UNROLL for (int i = 0; i < TILE_TOKENS; i++) {
            UNROLL for (int v = 0; v < TILE_VECS; v++) {
                VecF term = __builtin_convertvector(sum[i][v], VecF) * w_scale[v];
                acc[i][v] = mul_add_v(term, splat_f(x.scale[i * stride + g]), acc[i][v]);
            }
        }
    }
    for (int i = 0; i < min_int(TILE_TOKENS, part->token_end - t); i++) {
        if (rows == PANEL_ROWS) put_rows(part, t + i, row, (float *)acc[i], PANEL_ROWS);
        else put_rows(part, t + i, row, (float *)acc[i], rows);
    }
}

#ifdef USE_AMX
// As matmul_tile, for AMX_TOKENS tokens: one vector of rows after the other. The sums of AMX come
// late, so the next group's products are begun before this group's sums are used.
INLINE void matmul_amx(const Matmul *part, int t, int row, const VecI *wq, const VecF *w_scale,
                       const int group) {
    const int n_groups = part->w->cols / group, group_vecs = group / 4 * TILE_VECS;
    const int rows = part->row_end - row, n_tokens = min_int(AMX_TOKENS, part->token_end - t);
    const size_t stride = part->x->stride;
    const Quantized x = quantized_row(part->x, t);
    for (int v = 0; v < TILE_VECS && v * LANES < rows; v++, wq++, w_scale++) {
        VecI dots[2][AMX_TOKENS];
        VecF acc[AMX_TOKENS] = {0}, out[AMX_TOKENS];
        const int first = row + v * LANES;
        for (int i = 0; i < n_tokens; i++) __builtin_prefetch(out_at(part, t + i, first), 1);
        amx_dots(dots[0], wq, TILE_VECS, x.q, stride * 4, group);
        for (int g = 0; g < n_groups; g++) {
            if (g + 1 < n_groups) {
                amx_dots(dots[(g + 1) % 2], wq + (g + 1) * group_vecs, TILE_VECS,
                         x.q + (g + 1) * group, stride * 4, group);
            }
            UNROLL for (int i = 0; i < AMX_TOKENS; i++) {
                VecF term = __builtin_convertvector(dots[g % 2][i], VecF) * w_scale[g * TILE_VECS];
                acc[i] = mul_add_v(term, splat_f(x.scale[i * stride + g]), acc[i]);
            }
        }
        // A copy has its address taken by put_rows, so acc can stay in registers.
        UNROLL for (int i = 0; i < AMX_TOKENS; i++) out[i] = acc[i];
        for (int i = 0; i < n_tokens; i++) {
            const float *values = (float *)&out[i];
            if (rows - v * LANES >= LANES) put_rows(part, t + i, first, values, LANES);
            else put_rows(part, t + i, first, values, rows - v * LANES);
        }
    }
}
#endif

// Transposes PANEL_ROWS rows from `row` on: wq (cols / 4, TILE_VECS), w_scale (n_groups,
// TILE_VECS).
INLINE void transpose_panel(const Matrix *w, VecI *wq, VecI *w_scale, int row, const int group) {
    const int n_groups = w->cols / group;
    float *floats = (float *)(w_scale + n_groups * TILE_VECS);  // (LANES, n_groups) half_scales
    const int32_t flip = has_amx ? 0 : FLIP;  // AMX multiplies signed bytes
    for (int v = 0; v < TILE_VECS; v++, row += LANES, wq++, w_scale++) {
        if (w->bits == 8) {
            transpose_rows(wq, TILE_VECS, w->q, w->rows, w->cols / 4, row, flip);
            transpose_rows(w_scale, TILE_VECS, w->scale, w->rows, n_groups, row, 0);
            continue;
        }
        transpose_rows(wq, TILE_VECS, w->nibbles, w->rows, w->cols / 8, row, 0);
        expand_nibbles(wq, TILE_VECS, w->cols, level_table(w->levels, flip), group);
        for (int r = 0; r < LANES; r++) {
            const int from = min_int(row + r, w->rows - 1);
            for (int g = 0; g < n_groups; g++) {
                floats[r * n_groups + g] = weight_scale(w, from, g, group);
            }
        }
        transpose_rows(w_scale, TILE_VECS, floats, LANES, n_groups, 0, 0);
    }
}

// PANEL_ROWS rows from `row` on times all tokens, while the rows are in this core's caches;
// meanwhile the next rows are prefetched.
INLINE void matmul_panel(const Matmul *part, const Workspace *own, int row, const int group) {
    const Matrix *w = part->w;
    const int n_tokens = part->token_end - part->token_begin;
    VecI *wq = own->panel, *w_scale = wq + w->cols / 4 * TILE_VECS;
    transpose_panel(w, wq, w_scale, row, group);
    const size_t end = (size_t)(row + PANEL_ROWS) * w->cols;
    const char *next = w->bits == 8 ? (char *)w->q + end : (char *)w->nibbles + end / 2;
    const char *next_scale = w->bits == 8 ? (char *)w->scale + end / group * 4
                                          : (char *)w->half_scale + end / group * 2;
    // Each tile prefetches an equal share of the next panel's weights and scales.
    const int step = has_amx ? AMX_TOKENS : TILE_TOKENS, tiles = (n_tokens + step - 1) / step;
    const int64_t share = (int64_t)PANEL_ROWS * w->cols * w->bits / 8 / tiles;
    const int64_t scale_share = share * 4 / group;
    for (int t = part->token_begin; t < part->token_end; t += step) {
        for (int64_t i = 0; i < share; i += 64) __builtin_prefetch(next + i);
        for (int64_t i = 0; i < scale_share; i += 64) __builtin_prefetch(next_scale + i);
        next += share;
        next_scale += scale_share;
        if (has_amx) matmul_amx(part, t, row, wq, (const VecF *)w_scale, group);
        else matmul_tile(part, t, row, wq, (const VecF *)w_scale, group);
    }
}

// Computes each element as the definition does, for builds without dot4. Works on a few rows at a
// time, so that they stay in the cache; 4-bit rows are first expanded to int8.
INLINE void matmul_plain(const Matmul *part, const Workspace *own, int row, const int group) {
    const Matrix *w = part->w;
    const int end = min_int(row + PANEL_ROWS, part->row_end), n_groups = w->cols / group;
    int8_t *q = own->panel;
    float *scale = (float *)(q + PANEL_ROWS * w->cols);
    const Matrix copy = {.rows = end - row, .cols = w->cols, .bits = 8, .q = q, .scale = scale};
    if (w->bits == 4) {
        for (int r = row; r < end; r++) {
            const uint8_t *pair = w->nibbles + (size_t)r * w->cols / 2;
            for (int g = 0; g < n_groups; g++, q += group) {
                for (int i = 0; i < group / 2; i++, pair++) {
                    q[i] = w->levels[*pair & 15];
                    q[group / 2 + i] = w->levels[*pair >> 4];
                }
                *scale++ = weight_scale(w, r, g, group);
            }
        }
    }
    for (int t = part->token_begin; t < part->token_end; t++) {
        for (int r = row; r < end; r++) {
            float value = w->bits == 4 ? dot_row(&copy, r - row, part->x, t, group)
                                       : dot_row(w, r, part->x, t, group);
            put_rows(part, t, r, &value, 1);
        }
    }
}

// The largest number of tokens for which one matvec each is faster than a panel for all, measured.
// At most 8: see panel_words.
INLINE int few_tokens(const Matrix *w) { return !HAVE_DOT4 ? 0 : w->bits == 4 ? 6 : 3; }

// With few tokens, a round of rows is read from memory for the first one, from the cache for the
// others.
INLINE void matmul_groups(const Matmul *part, const Workspace *own, const int group) {
    const int n_tokens = part->token_end - part->token_begin;
    const bool few = n_tokens <= few_tokens(part->w);
    const int step = few ? n_streams * LANES : PANEL_ROWS;
    if (has_amx && !few) amx_shapes(group);
    for (int r = part->row_begin; r < part->row_end && n_tokens > 0; r += step) {
        if (!HAVE_DOT4) matmul_plain(part, own, r, group);
        else if (!few) matmul_panel(part, own, r, group);
        for (int t = part->token_begin; few && t < part->token_end; t++) {
            if (part->w->bits == 4) matvec_here(part, own, t, r, group, 4);
            else matvec_here(part, own, t, r, group, 8);
        }
    }
}

static void matmul_rows(const Matmul *part, const Workspace *own) {
    switch (part->w->group) {  // as a constant in the loops: twice as fast
    case 32: matmul_groups(part, own, 32); break;
    case 64: matmul_groups(part, own, 64); break;
    case 128: matmul_groups(part, own, 128); break;
    case 256: matmul_groups(part, own, 256); break;
    }
}

typedef struct {
    const State *s;
    Matmul all;
} MatmulJob;

static void matmul_job(void *arg, int begin, int end, int thread) {
    const MatmulJob *job = arg;
    Matmul part = job->all;
    part.row_begin = begin * PANEL_ROWS;
    part.row_end = min_int(end * PANEL_ROWS, part.w->rows);
    part.out += part.row_begin;
    matmul_rows(&part, &job->s->workspace[thread]);
}

static void matmul(const State *s, Matmul all) {
    // One token: a share is whole rounds of matvec, for any number of streams.
    const int chunk = all.token_end - all.token_begin == 1 ? MOST_STREAMS * LANES / PANEL_ROWS : 1;
    parallel(matmul_job, &(MatmulJob){s, all}, (all.w->rows + PANEL_ROWS - 1) / PANEL_ROWS, chunk);
}

static int draft_rows(void) { return HAVE_DOT4 ? TILE_TOKENS : 1; }

// ------------------------------------------------------------------------------------------------
// The KV cache and attention
//
// The cache is cut into blocks of LANES positions (the floats of a SIMD vector). A block holds all
// layers and kv heads, so memory is touched only as positions come into use. Within a block, each
// layer's kv head has
//
//   keys    (head_dim, LANES positions)
//   values  (value_dim / LANES, LANES positions, LANES columns)
//
// so that a tile of scores reads its keys from front to back, and a tile of values one unbroken
// part of each block. A vector of keys holds element j of LANES positions, so that their scores
// make a vector, too; a vector of values holds LANES columns of one position, so that their sums
// make LANES columns of the result.

// Columns of the values: head_dim, and zeros up to a whole vector
static int value_dim(const Config *c) { return round_up(c->head_dim, LANES); }

static size_t block_floats(const Config *c) {  // of one layer's kv head in a block
    return (size_t)LANES * (c->head_dim + value_dim(c));
}

// Floats from a block of positions to the next. The number of pairs (layer, kv head) is made odd:
// with an even one, all blocks of a head would share a fraction of the L2 cache's sets.
static size_t block_stride(const Config *c) {
    return ((size_t)c->n_layers * c->n_kv_heads | 1) * block_floats(c);
}

static float *cache_block(const Pass *p, int kv_head, int block) {
    const Config *c = &p->m->config;
    const size_t head = (size_t)p->l * c->n_kv_heads + kv_head;
    return p->m->state.cache + block * block_stride(c) + head * block_floats(c);
}

static float *key_at(const Pass *p, int kv_head, int pos) {  // element j is [j * LANES]
    return cache_block(p, kv_head, pos / LANES) + pos % LANES;
}

// For j a multiple of LANES, elements j .. j + LANES - 1 begin at [j * LANES].
static float *value_at(const Pass *p, int kv_head, int pos) {
    const int head_dim = p->m->config.head_dim;
    return cache_block(p, kv_head, pos / LANES) + head_dim * LANES + pos % LANES * LANES;
}

static void cache_put_key(const Pass *p, int kv_head, int pos, const float *k) {
    float *key = key_at(p, kv_head, pos);
    for (int j = 0; j < p->m->config.head_dim; j++) key[j * LANES] = k[j];
}

static void cache_put_value(const Pass *p, int kv_head, int pos, const float *v) {
    const int head_dim = p->m->config.head_dim;
    float *value = value_at(p, kv_head, pos);
    for (int j = 0; j < head_dim; j += LANES) {
        memcpy(value + j * LANES, v + j, min_int(LANES, head_dim - j) * sizeof(float));
    }
}

INLINE float cache_key(const Pass *p, int kv_head, int pos, int j) {
    return key_at(p, kv_head, pos)[j * LANES];
}

INLINE float cache_value(const Pass *p, int kv_head, int pos, int j) {
    return value_at(p, kv_head, pos)[j / LANES * LANES * LANES + j % LANES];
}

// A row of attention is one query head of one token. It goes through the positions in spans and
// keeps the scores of one span only, as in FlashAttention (arXiv 2205.14135): each span has a
// softmax relative to the largest score there, and softmax_join adds it to those before.
enum { SPAN = 256 };

typedef struct {       // of the scores of some positions
    float max, total;  // the largest; the sum of the terms exp(score - max)
} Softmax;

// Adds the softmax of further positions. All terms become relative to the larger max, so those
// before get the factor `keep`, the further ones `take`. more.max is not -INFINITY.
INLINE void softmax_join(Softmax *all, Softmax more, float *keep, float *take) {
    const float max = all->max > more.max ? all->max : more.max;
    *keep = fast_exp(all->max - max);
    *take = fast_exp(more.max - max);
    *all = (Softmax){max, mul_add(all->total, *keep, more.total * *take)};
}

// The rows of a kv head are those of all query heads that share it, token by token. A task is up to
// ATT_TASK of them. A thread takes up to ATT_SIDE tasks at a time through each span: most often
// they have the same kv head, so the span's keys and values (256 KB if head_dim is 128) come to L2
// once. A tile is ATT_ROWS rows by two vectors, of positions for the scores, of columns for the
// values; its sums stay in registers, 24 of the 32 of AVX-512, 12 of the 16 of AVX2. A task of few
// rows, as in decoding, has tiles of ATT_FEW or of 2 rows, so that few are computed in vain. Those
// of 2 rows have ATT_VECS vectors of columns, to read values in longer parts: 8 KB instead of 2
// with AVX-512. (AVX2 has too few registers for so many, and is 1.25 times as fast nevertheless.)
enum { ATT_ROWS = LANES == 16 ? 12 : 6, ATT_FEW = 6, ATT_TASK = 24, ATT_SIDE = 4 };
enum { ATT_SHARED = 2 };          // the most tasks a thread whose spans are shared: see shared_task
enum { ATT_VECS = 8 };            // vectors of columns in a tile of 2 rows
enum { LINE_VECS = 16 / LANES };  // vectors in a cache line, which is prefetched once
enum { Q_STRIDE = (ATT_TASK + LANES - 1) / LANES * LANES };  // for transpose_rows: whole vectors
enum { SCORE_STRIDE = SPAN + LANES };  // rows a multiple of 1 KB apart would share L1 sets
_Static_assert(SPAN % (2 * LANES) == 0 && ATT_TASK % ATT_ROWS == 0, "whole tiles");

typedef struct {             // a task's attention to some spans
    Softmax softmax[ATT_TASK];
    float *sum;              // (ATT_TASK, value_dim)  of the terms times the values
} Partial;

typedef struct {
    const Pass *p;
    int kv_head;
    int n;                   // rows: 2, ATT_FEW, or a multiple of ATT_ROWS
    float *q;                // (head_dim, Q_STRIDE)   transposed: a tile's rows are neighbours
    float *out[ATT_TASK];    // (head_dim)             each row's place in State.a
    int len[ATT_TASK];       // positions that each row sees, its own and those before; ascending
    Partial all;
    Partial *by_span;        // (spans)                of task 0 .. ATT_SHARED - 1: see shared_task
} AttentionTask;

typedef struct AttentionBuffers {
    AttentionTask task[ATT_SIDE];
    float *score;            // (ATT_TASK, SCORE_STRIDE)  of one task and one span
} AttentionBuffers;

typedef struct {
    const AttentionTask *task;
    int start, end;          // positions start .. end - 1, start a multiple of SPAN
    float *score;            // AttentionBuffers.score of the calling thread
    Partial *to;             // what the span's attention is added to
    float keep[ATT_TASK], take[ATT_TASK];  // see softmax_join
} Span;

static int span_count(int positions) { return (positions + SPAN - 1) / SPAN; }

static AttentionBuffers *attention_init(const Config *c, int seq_len) {
    const char *what = "attention (-c makes it smaller)";
    const int spans = span_count(seq_len), sums = ATT_TASK * value_dim(c);
    AttentionBuffers *own = alloc(1, sizeof(AttentionBuffers), what);
    own->score = alloc(ATT_TASK * SCORE_STRIDE, sizeof(float), what);
    for (int i = 0; i < ATT_SIDE; i++) {
        own->task[i].q = alloc(Q_STRIDE * c->head_dim, sizeof(float), what);
        own->task[i].all.sum = alloc(sums, sizeof(float), what);
    }
    for (int i = 0; i < ATT_SHARED; i++) {
        Partial *partial = own->task[i].by_span = alloc(spans, sizeof(Partial), what);
        float *sum = alloc((size_t)spans * sums, sizeof(float), what);
        for (int k = 0; k < spans; k++) partial[k].sum = sum + (size_t)k * sums;
    }
    return own;
}

// score = q . k / sqrt(head_dim), for `rows` rows from r on and `vecs` blocks of positions from pos
// on. The CPU can't foresee where the next blocks are, so the first tile prefetches them for all.
INLINE void score_tile(const Span *span, int r, int pos, const int rows, const int vecs) {
    const AttentionTask *task = span->task;
    const int head_dim = task->p->m->config.head_dim;
    const size_t next = block_stride(&task->p->m->config);
    const float scale = 1 / sqrtf((float)head_dim), *q = task->q + r;
    float *score = span->score + r * SCORE_STRIDE + pos - span->start;
    const VecF *keys[2];
    VecF sum[ATT_ROWS][2] = {0};
    for (int v = 0; v < vecs; v++) {
        keys[v] = (VecF *)key_at(task->p, task->kv_head, pos + v * LANES);
    }
    for (int j = 0; j < head_dim; j++) {
        for (int v = 0; v < vecs && r == 0 && j % LINE_VECS == 0; v++) {
            __builtin_prefetch((float *)&keys[v][j] + 2 * next);  // the next tile's
        }
        UNROLL for (int i = 0; i < rows; i++) {
            VecF qj = splat_f(q[j * Q_STRIDE + i]);
            UNROLL for (int v = 0; v < vecs; v++) sum[i][v] = mul_add_v(keys[v][j], qj, sum[i][v]);
        }
    }
    for (int i = 0; i < rows; i++, score += SCORE_STRIDE) {
        for (int v = 0; v < vecs; v++) *(VecF *)(score + v * LANES) = sum[i][v] * scale;
    }
}

// to->sum = keep * to->sum + take * (the span's terms times values), for `rows` rows from r on and
// `vecs` vectors of columns from vector j on. Prefetches not the next block but the one after it:
// the next may be needed before its prefetch has come.
INLINE void value_tile(const Span *span, int r, int j, const int rows, const int vecs) {
    const AttentionTask *task = span->task;
    const Config *c = &task->p->m->config;
    const size_t next = block_stride(c), vectors = value_dim(c) / LANES;
    const float *term = span->score + r * SCORE_STRIDE;
    VecF *all = (VecF *)span->to->sum + r * vectors + j, sum[ATT_ROWS][ATT_VECS] = {0};
    for (int pos = span->start; pos < span->end; pos += LANES) {
        const VecF *values = (VecF *)value_at(task->p, task->kv_head, pos) + j * LANES;
        for (int k = 0; k < min_int(LANES, span->end - pos); k++, term++) {
            for (int v = 0; v < vecs && r == 0 && k % LINE_VECS == 0; v++) {
                __builtin_prefetch((float *)&values[v * LANES + k] + 2 * next);
            }
            UNROLL for (int i = 0; i < rows; i++) {
                VecF weight = splat_f(term[i * SCORE_STRIDE]);
                UNROLL for (int v = 0; v < vecs; v++) {
                    sum[i][v] = mul_add_v(values[v * LANES + k], weight, sum[i][v]);
                }
            }
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        const VecF keep = splat_f(span->keep[r + i]), take = splat_f(span->take[r + i]);
        UNROLL for (int v = 0; v < vecs; v++) {
            all[i * vectors + v] = mul_add_v(all[i * vectors + v], keep, sum[i][v] * take);
        }
    }
}

// Each row's scores become the terms exp(score - max). Positions after the row's own get -INFINITY,
// so that their terms are 0 (causal), up to a multiple of 16: sum_of is slow with a rest. If there
// is nothing else (or all scores overflow), max is finite nevertheless, so that all terms are 0.
static void span_softmax(Span *span) {
    const int width = round_up(span->end - span->start, 16);
    float *score = span->score;
    for (int r = 0; r < span->task->n; r++, score += SCORE_STRIDE) {
        const int seen = max_int(span->task->len[r] - span->start, 0);
        for (int i = seen; i < width; i++) score[i] = -INFINITY;
        float max = max_of(score, width);
        if (max == -INFINITY) max = -FLT_MAX;
        const float total = softmax_terms(score, width, max);
        softmax_join(&span->to->softmax[r], (Softmax){max, total}, &span->keep[r], &span->take[r]);
    }
}

// Runs value_tile for all rows and columns from vector j on, in as many tiles of `vecs` vectors as
// fit. Returns the first vector that is left.
INLINE int value_tiles(const Span *span, int j, const int rows, const int vecs) {
    const int vectors = value_dim(&span->task->p->m->config) / LANES;
    for (; j + vecs <= vectors; j += vecs) {
        for (int r = 0; r < span->task->n; r += rows) value_tile(span, r, j, rows, vecs);
    }
    return j;
}

INLINE void span_tiles(Span *span, const int rows) {
    // Vectors of columns in the widest tile. With more than 2 rows it has 2 * ATT_ROWS sums.
    const int wide = rows == 2 ? ATT_VECS : 2 * ATT_ROWS / rows;
    for (int pos = span->start; pos < span->end; pos += 2 * LANES) {
        for (int r = 0; r < span->task->n; r += rows) {
            if (span->end - pos > LANES) score_tile(span, r, pos, rows, 2);
            else score_tile(span, r, pos, rows, 1);
        }
    }
    span_softmax(span);
    int j = wide > 2 ? value_tiles(span, 0, rows, wide) : 0;
    j = value_tiles(span, j, rows, 2);
    value_tiles(span, j, rows, 1);
}

// Adds to *to what the task's rows find in the span that begins at `start`.
static void attend_span(Partial *to, const AttentionTask *task, int start, float *score) {
    const int end = min_int(start + SPAN, task->len[task->n - 1]);
    Span span = {.task = task, .start = start, .end = end, .score = score, .to = to};
    if (start >= end) return;
    switch (task->n) {  // how many rows a tile has must be known when compiling
    case 2: span_tiles(&span, 2); break;
    case ATT_FEW: span_tiles(&span, ATT_FEW); break;
    default: span_tiles(&span, ATT_ROWS); break;
    }
}

static void partial_clear(Partial *partial, const AttentionTask *task) {
    for (int r = 0; r < task->n; r++) partial->softmax[r] = (Softmax){-INFINITY, 0};
    memset(partial->sum, 0, task->n * value_dim(&task->p->m->config) * sizeof(float));
}

// Adds what the same rows found at further positions.
static void partial_join(Partial *all, const Partial *more, const AttentionTask *task) {
    const int width = value_dim(&task->p->m->config);
    for (int r = 0; r < task->n; r++) {
        float keep, take, *sum = all->sum + r * width, *further = more->sum + r * width;
        softmax_join(&all->softmax[r], more->softmax[r], &keep, &take);
        for (int j = 0; j < width; j++) sum[j] = mul_add(sum[j], keep, further[j] * take);
    }
}

static int rows_per_kv_head(const Pass *p) {
    return (p->n - p->first) * (p->m->config.n_heads / p->m->config.n_kv_heads);
}

static int tasks_per_kv_head(const Pass *p) {
    return (rows_per_kv_head(p) + ATT_TASK - 1) / ATT_TASK;
}

static void task_init(AttentionTask *task, const Pass *p, int number) {
    const Config *c = &p->m->config;
    const State *s = &p->m->state;
    const int per_kv = c->n_heads / c->n_kv_heads, rows = rows_per_kv_head(p);
    const int row = number % tasks_per_kv_head(p) * ATT_TASK, count = min_int(ATT_TASK, rows - row);
    float *q = task->all.sum;  // (n, head_dim) the queries, until they are transposed
    task->p = p;
    task->kv_head = number / tasks_per_kv_head(p);
    task->n = count <= 2 ? 2 : count <= ATT_FEW ? ATT_FEW : round_up(count, ATT_ROWS);
    for (int r = 0; r < task->n; r++) {  // past the end the last row is repeated
        const int i = min_int(row + r, rows - 1), t = p->first + i / per_kv;
        const int head = task->kv_head * per_kv + i % per_kv;
        const size_t at = (size_t)t * c->q_dim + head * c->head_dim;
        memcpy(q + r * c->head_dim, s->q + at, c->head_dim * sizeof(float));
        task->out[r] = s->a + at;
        task->len[r] = s->pos[t] + 1;
    }
    for (int r = 0; r < task->n; r += LANES) {
        VecI *out = (VecI *)(task->q + r);
        transpose_rows(out, Q_STRIDE / LANES, q, task->n, c->head_dim, r, 0);
    }
    partial_clear(&task->all, task);
}

// a = sum / total
static void task_output(const AttentionTask *task) {
    const Config *c = &task->p->m->config;
    for (int r = 0; r < task->n; r++) {
        const float *sum = task->all.sum + r * value_dim(c);
        const float inverse = 1 / task->all.softmax[r].total;
        float *out = task->out[r];  // GCC does not vectorize a loop over task->out[r][j]
        for (int j = 0; j < c->head_dim; j++) out[j] = sum[j] * inverse;
    }
}

static int pass_spans(const Pass *p) { return span_count(p->m->state.pos[p->n - 1] + 1); }

static void attend_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    AttentionBuffers *own = p->m->state.workspace[thread].attention;
    for (int count; begin < end; begin += count) {
        count = min_int(ATT_SIDE, end - begin);
        for (int i = 0; i < count; i++) task_init(&own->task[i], p, begin + i);
        for (int k = 0; k < pass_spans(p); k++) {
            for (int i = 0; i < count; i++)
                attend_span(&own->task[i].all, &own->task[i], k * SPAN, own->score);
        }
        for (int i = 0; i < count; i++) task_output(&own->task[i]);
    }
}

// If the number of tasks is small and no multiple of that of threads, some would be idle: decoding
// with 8 kv heads has 8. Then they share the pairs (task, span), 8 * 16 at 4,000 positions. Each
// pair has its own Partial, and these are joined from the first span to the last: the same bits as
// attend_job's. Task i is in the workspace of thread i / ATT_SHARED, whoever works on it.
static AttentionTask *shared_task(const Pass *p, int i) {
    return &p->m->state.workspace[i / ATT_SHARED].attention->task[i % ATT_SHARED];
}

static void shared_init_job(void *arg, int begin, int end, int thread) {
    (void)thread;
    for (int i = begin; i < end; i++) task_init(shared_task(arg, i), arg, i);
}

static void shared_span_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const int spans = pass_spans(p);
    float *score = p->m->state.workspace[thread].attention->score;
    for (int i = begin; i < end; i++) {
        const AttentionTask *task = shared_task(p, i / spans);
        Partial *partial = &task->by_span[i % spans];
        partial_clear(partial, task);
        attend_span(partial, task, i % spans * SPAN, score);
    }
}

static void shared_join_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    (void)thread;
    for (int i = begin; i < end; i++) {
        AttentionTask *task = shared_task(p, i);
        for (int k = 0; k < span_count(task->len[task->n - 1]); k++)
            partial_join(&task->all, &task->by_span[k], task);
        task_output(task);
    }
}

static void attend_all(const Pass *p) {
    const int tasks = tasks_per_kv_head(p) * p->m->config.n_kv_heads, spans = pass_spans(p);
    const bool even = tasks % n_threads == 0, many = tasks > ATT_SHARED * n_threads;
    if (even || many || spans <= 2) {  // two spans are not worth the joining
        parallel(attend_job, (void *)p, tasks, 1);
        return;
    }
    parallel(shared_init_job, (void *)p, tasks, 1);
    parallel(shared_span_job, (void *)p, tasks * spans, 1);
    parallel(shared_join_job, (void *)p, tasks, 1);
}

// ------------------------------------------------------------------------------------------------
// The memory of a run: everything that it needs is allocated here, once

#define FOR_BATCH "the activations (-b makes them smaller)"

// Spare rows follow, because the last tile of a product may read past the n rows.
static Quantized quantized_init(size_t n, int cols, int group) {
    const size_t words = cols / 4, n_groups = cols / group;
    const size_t stride = (words + 2 * n_groups + 15) / 16 * 16;  // rows are aligned to 64 bytes
    int32_t *p = alloc((n + MOST_TILE_TOKENS) * stride, sizeof(*p), FOR_BATCH);
    return (Quantized){(int8_t *)p, (float *)p + words, p + words + n_groups, stride};
}

// The size of Workspace.panel for a matrix of so many columns. It is at least that of wq, w_scale
// and floats of transpose_panel; of columns, terms and splits of matvec, for at most 8 tokens (see
// few_tokens); and of q and scale of matmul_plain.
static size_t panel_words(int cols, int group) {
    return (size_t)(PANEL_ROWS + LANES) * (cols / 4 + 2 * cols / group);
}

static void cache_init(State *s, const Config *c) {
    const size_t blocks = ((size_t)s->seq_len + LANES - 1) / LANES;
    const char *what = "the KV cache (-c makes it smaller)";
    s->cache = alloc(blocks, block_stride(c) * sizeof(float), what);
#ifdef MADV_HUGEPAGE  // attention jumps from block to block: huge pages save TLB misses
    char *page = (char *)s->cache + (-(uintptr_t)s->cache & (sysconf(_SC_PAGESIZE) - 1));
    madvise(page, blocks * block_stride(c) * sizeof(float), MADV_HUGEPAGE);
#endif
}

static void state_init(Model *m, int seq_len, int batch, int logit_rows) {
    const Config *c = &m->config;
    State *s = &m->state;
    const int widest = max_int(max_int(c->dim, c->q_dim), c->hidden_dim);  // cols of any matrix
    const size_t n = batch;
    s->seq_len = seq_len;
    s->batch = batch;
    s->pos = alloc(n, sizeof(int), FOR_BATCH);
    s->cos = alloc(n * c->head_dim / 2, sizeof(float), FOR_BATCH);
    s->sin = alloc(n * c->head_dim / 2, sizeof(float), FOR_BATCH);
    s->x = alloc(n * c->dim, sizeof(float), FOR_BATCH);
    s->q = alloc(n * c->q_dim, sizeof(float), FOR_BATCH);
    s->a = alloc(n * c->q_dim, sizeof(float), FOR_BATCH);
    s->xq = quantized_init(n, c->dim, c->group_size);
    s->aq = quantized_init(n, c->q_dim, c->group_size);
    s->hq = quantized_init(n * max_int(c->n_experts_used, 1), c->hidden_dim, c->group_size);
    if (c->n_experts) {
        Routing *r = s->routing = alloc(1, sizeof(Routing), FOR_BATCH);
        r->h = alloc(n * c->dim, sizeof(float), FOR_BATCH);
        r->share = alloc(n * c->n_experts, sizeof(float), FOR_BATCH);
        r->expert = alloc(c->n_experts, sizeof(int), FOR_BATCH);
        r->token = alloc(n * c->n_experts_used, sizeof(int), FOR_BATCH);
        r->place = alloc(c->n_experts + 1, sizeof(int), FOR_BATCH);
    }
    s->logits = alloc((size_t)logit_rows * c->vocab_size, sizeof(float), FOR_BATCH);
    s->logit_rows = logit_rows;
    s->workspace = alloc(n_threads, sizeof(Workspace), FOR_BATCH);
    for (int i = 0; i < n_threads; i++) {
        Workspace *own = &s->workspace[i];
        own->h = alloc(c->dim, sizeof(float), FOR_BATCH);
        own->kv = alloc(n * c->head_dim, sizeof(float), FOR_BATCH);
        own->gate = alloc(n * c->group_size, sizeof(float), FOR_BATCH);
        own->up = alloc(n * c->group_size, sizeof(float), FOR_BATCH);
        if (c->n_experts) own->gathered = quantized_init(n, c->dim, c->group_size);
        own->panel = alloc(panel_words(widest, c->group_size), sizeof(int32_t), FOR_BATCH);
        own->attention = attention_init(c, seq_len);
    }
    cache_init(s, c);
    s->freq = alloc(c->head_dim / 2, sizeof(float), FOR_BATCH);
    rope_init(s, c);
}

// ------------------------------------------------------------------------------------------------
// Progress: what a terminal shows while a text takes longer than two seconds

static struct {
    const Model *model;
    double start;
    size_t first, tokens;  // the first position, and how many tokens run from there on
    size_t shown;          // the count on the terminal, 0: none
    size_t done, total;    // tokens times layers
    double drawn;          // when, in seconds from the start
} progress;

static void progress_start(const Model *m, size_t first, size_t tokens) {
    progress.model = m;
    progress.start = now();
    progress.first = first;
    progress.tokens = tokens;
    progress.done = 0;
    progress.drawn = 0;
    progress.total = tokens * m->config.n_layers;
}

// The time of a text's first n tokens, in units of what the matrices of one token take. Attention
// at position `equal` takes as long: the fp32 products of q with K, and of the shares with V, take
// about 3 times the time of int8 ones. A text longer than the context begins anew there. (The
// classifier, which perplexity runs for each token, is left out.)
static double work_of(const Model *m, double n) {
    const Config *c = &m->config;
    const double kv_dim = c->n_kv_heads * c->head_dim, experts = max_int(c->n_experts_used, 1);
    const double products = c->dim * (2 * (c->q_dim + kv_dim) + 3 * c->hidden_dim * experts);
    const double equal = products / (2 * c->q_dim * 3.0), len = m->state.seq_len;
    const double rest = fmod(n, len);
    return (n - rest) * (1 + len / equal / 2) + rest * (1 + rest / equal / 2);
}

// Clears the line, before an answer, a notice or an error begins.
static void progress_end(void) {
    if (progress.shown) fputs("\r\033[K", stderr);
    progress.shown = progress.total = 0;
}

static void progress_add(int n) {
    progress.done += n;
    if (progress.total == 0 || quiet || !is_terminal(STDERR_FILENO)) return;
    const Model *m = progress.model;
    const double ran = (double)progress.tokens * progress.done / progress.total;
    const double before = work_of(m, progress.first), here = work_of(m, progress.first + ran);
    const double end = work_of(m, progress.first + progress.tokens);
    const double seconds = now() - progress.start;
    const double left = seconds * (end - here) / (here - before);
    const size_t count = ran;
    if (count == progress.shown || (!progress.shown && seconds + left < 2)) return;
    if (seconds < progress.drawn + 0.1) return;
    progress.shown = count;
    progress.drawn = seconds;
    fprintf(stderr, "\r%zu of %zu tokens, %.0f s left\033[K", count, progress.tokens, left);
}

// ------------------------------------------------------------------------------------------------
// POSIX and Windows: everything that differs between systems

#ifdef _WIN32
// POSIX as far as it is used here: what MinGW lacks, or has without UTF-8 or large files
#define O_NONBLOCK 0
#define MAP_FAILED NULL
#define mmap(at, size, protection, flags, fd, offset) map_file(fd)
#define open(path, flags) _wopen(wide(path), (flags) | _O_BINARY)
#define isatty(fd) GetConsoleMode(handle(fd), &(DWORD){0})
#define write write_bytes
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

static int write_bytes(int fd, const void *p, size_t n) {
    int written = _write(fd, p, n < 1 << 20 ? n : 1 << 20);
    if (written < 0 && GetFileType(handle(fd)) == FILE_TYPE_PIPE) errno = EPIPE;
    return written;
}

// A console gives a line as UTF-16, which ends in \r\n, or at Ctrl-D or Ctrl-Z.
static ssize_t read_bytes(int fd, void *p, size_t size) {
    static wchar_t text[8192];
    CONSOLE_READCONSOLE_CONTROL ends = {sizeof(ends), 0, 1 << 4 | 1 << 26, 0};
    DWORD n = 0;
    if (!isatty(fd)) return _read(fd, p, size < 1 << 20 ? size : 1 << 20);
    const DWORD room = size / 3 < 8192 ? size / 3 : 8192;
    if (!ReadConsoleW(handle(fd), text, room, &n, &ends) || n == 0) {
        Sleep(100);  // Ctrl-C: its handler runs in a thread of its own
        errno = EINTR;
        return interrupted ? -1 : 0;
    }
    if (text[n - 1] == 4 || text[n - 1] == 26) n--;
    else if (n > 1 && text[n - 2] == '\r') text[--n - 1] = '\n';
    return WideCharToMultiByte(CP_UTF8, 0, text, n, p, size, NULL, NULL);
}

static void wait_for(int fd, bool reading) { (void)fd, (void)reading; }

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

static FileKind file_kind(const char *path) {
    const DWORD attributes = GetFileAttributesW(wide(path));
    errno = ENOENT;
    return attributes == INVALID_FILE_ATTRIBUTES ? NO_FILE
           : attributes & FILE_ATTRIBUTE_DIRECTORY ? DIRECTORY : REGULAR_FILE;
}

static int cpu_count(void) {  // hardware threads; two of them may share a core
    DWORD_PTR mine, all;
    GetProcessAffinityMask(GetCurrentProcess(), &mine, &all);
    return __builtin_popcountll(mine);
}

// Makes the arguments UTF-8 (argv reuses the array that held the UTF-16 pointers), standard input
// and output binary, and the console's output UTF-8.
static void start_platform(int *argc, char ***argv) {
    static char text[3 * 32768], *arg = text;  // a command line has at most 32,767 characters
    wchar_t **args = CommandLineToArgvW(GetCommandLineW(), argc);
    *argv = (char **)args;
    for (int i = 0; i < *argc; i++) {
        int room = text + sizeof(text) - arg;
        int n = WideCharToMultiByte(CP_UTF8, 0, args[i], -1, arg, room, NULL, NULL);
        (*argv)[i] = arg;
        arg += n;
    }
    for (int fd = 0; fd < 3; fd++) _setmode(fd, _O_BINARY);
    SetConsoleOutputCP(CP_UTF8);
    SetConsoleMode(handle(STDOUT_FILENO), ENABLE_PROCESSED_OUTPUT | ENABLE_WRAP_AT_EOL_OUTPUT |
                                          ENABLE_VIRTUAL_TERMINAL_PROCESSING);
}
#else
#ifdef __linux__
// Reads up to two numbers from the start of a file; returns how many.
static int read_numbers(long long *numbers, const char *folder, const char *name) {
    char path[8192];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *f = fopen(path, "r");
    int n = f ? fscanf(f, "%lld %lld", &numbers[0], &numbers[1]) : 0;
    if (f) fclose(f);
    return n > 0 ? n : 0;
}

// The CPU quota of this cgroup and its ancestors (version 2), in cores, or INT_MAX. cpu.max is
// "QUOTA PERIOD", or "max PERIOD" for no limit.
static int cgroup_cores(void) {
    char folder[4200] = "/sys/fs/cgroup";
    double cores = INT_MAX;
    FILE *f = fopen("/proc/self/cgroup", "r");
    if (f) (void)!fscanf(f, "0::%4095[^\n]", folder + strlen(folder));
    if (f) fclose(f);
    for (char *end; (end = strrchr(folder, '/')); *end = 0) {
        long long time[2];
        if (read_numbers(time, folder, "cpu.max") == 2 && time[0] > 0 && time[1] > 0)
            cores = fmin(cores, ceil((double)time[0] / time[1]));
    }
    return (int)cores;
}

// How many cores a set of CPUs has: the CPUs of one core name the same first sibling.
static int physical_cores(const cpu_set_t *set) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        char folder[64];
        long long siblings[2] = {cpu};
        if (!CPU_ISSET(cpu, set)) continue;
        snprintf(folder, sizeof(folder), "/sys/devices/system/cpu/cpu%d/topology", cpu);
        read_numbers(siblings, folder, "thread_siblings_list");
        CPU_SET(siblings[0], &cores);
    }
    return CPU_COUNT(&cores);
}
#endif

// Physical cores, as a second thread on a core gains nothing; on macOS the fast ones. Where the
// system does not tell (Linux and macOS do), hardware threads.
static int cpu_count(void) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = physical_cores(&set);
    cores = min_int((int)cores, cgroup_cores());
#elif defined(__APPLE__)
    int fast = 0;
    size_t size = sizeof(fast);
    if (sysctlbyname("hw.perflevel0.physicalcpu", &fast, &size, NULL, 0) == 0) cores = fast;
#endif
    return cores > 0 ? (int)cores : 1;
}

static FileKind file_kind(const char *path) {
    struct stat st;
    if (stat(path, &st) != 0) return NO_FILE;
    return S_ISREG(st.st_mode) ? REGULAR_FILE : S_ISDIR(st.st_mode) ? DIRECTORY : SPECIAL_FILE;
}

// Waits until a file in non-blocking mode can be read or written.
static void wait_for(int fd, bool reading) {
    poll(&(struct pollfd){fd, reading ? POLLIN : POLLOUT, 0}, 1, -1);
}

// A pasted block's lines arrive within about 30 ms. Normally the terminal counts only whole lines;
// what follows the last newline is counted only while ICANON is off. Signals are blocked meanwhile:
// one that ended the program would leave the terminal that way.
static Waiting input_waits(void) {
    int waiting = 0;
    for (int i = 0; i < 2; i++) {
        if (i > 0) nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
        if (ioctl(STDIN_FILENO, FIONREAD, &waiting) == 0 && waiting > 0) return LINE;
    }
    struct termios cooked;
    sigset_t all, before;
    if (tcgetattr(STDIN_FILENO, &cooked) != 0) return NOTHING;
    struct termios raw = cooked;
    raw.c_lflag &= ~(tcflag_t)ICANON;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    ioctl(STDIN_FILENO, FIONREAD, &waiting);
    tcsetattr(STDIN_FILENO, TCSANOW, &cooked);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return waiting > 0 ? PART : NOTHING;
}

static void start_platform(int *argc, char ***argv) { (void)argc, (void)argv; }
#endif

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static bool is_terminal(int fd) { return isatty(fd); }

static Bytes file_map(const char *path) {
    int fd = open(path, O_RDONLY | O_NONBLOCK);  // does not wait for the writer of a named pipe
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) die("%s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode)) die("%s: wrong kind of file, expected a regular file", path);
    if (st.st_size == 0) die("%s: wrong size, expected a file with data, found 0 bytes", path);
    void *p = mmap(NULL, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) die("%s: can't be mapped: %s", path, strerror(errno));
    close(fd);
#ifdef MADV_HUGEPAGE
    // Asks for pages of 2 MB, if the file system has them: fewer TLB misses. Not if memory may be
    // too small for the model: an expert's matrix, often of less than 1 MB, would read more.
    const double memory = (double)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    if (st.st_size < 0.75 * memory) madvise(p, st.st_size, MADV_HUGEPAGE);
#endif
    return (Bytes){p, st.st_size};
}

static ssize_t read_some(int fd, void *p, size_t n) {
    for (;;) {
        ssize_t got = read(fd, p, n);
        if (got >= 0 || interrupted || (errno != EINTR && errno != EAGAIN)) return got;
        if (errno == EAGAIN) wait_for(fd, true);
    }
}

static const char *file_read(Buffer *b, const char *path) {
    const bool is_stdin = strcmp(path, "-") == 0;
    const char *error = NULL;
    int fd = is_stdin ? STDIN_FILENO : open(path, O_RDONLY);
    if (fd < 0) return strerror(errno);
    for (ssize_t got = 1; got != 0 && !error;) {
        b->p = grow(b->p, &b->cap, b->n, 65536, 1);
        got = read_some(fd, b->p + b->n, b->cap - b->n);
        if (got < 0) error = strerror(errno);
        if (got > 0) b->n += got;
        if (b->n >= INT_MAX) error = "too long, expected less than 2 GB";
    }
    if (!is_stdin) close(fd);
    return error;
}

static int terminal_line(void) {
#ifdef __APPLE__
    return MAX_CANON - 1;
#else
    return 4095;
#endif
}

static void write_stdout(Bytes text) {
    while (text.n) {
        ssize_t n = write(STDOUT_FILENO, text.p, text.n);
        if (n < 0 && errno == EPIPE) exit(EXIT_SUCCESS);  // the reader has seen enough
        if (n < 0 && errno == EAGAIN) wait_for(STDOUT_FILENO, false);
        else if (n < 0 && errno != EINTR) die("stdout: %s", strerror(errno));
        if (n > 0) text = bytes_from(text, n);
    }
}

// Once `stoppable` is set, Ctrl-C stops an answer, or a conversation that waits for a message.
// Before that, or if the one before had no effect for a second, it ends the program.
static void on_interrupt(int signal) {
    static volatile double first;
    (void)signal;
    if (!stoppable || (interrupted && now() > first + 1)) _exit(EXIT_INTERRUPT);
    if (!interrupted) first = now();
    interrupted = 1;
}

// SIGILL: this CPU is older than the one that the program was built for. SIGBUS: a mapped file has
// become shorter, or its disk fails. If several threads get here, only the first one reports.
static void on_fatal(int signal) {
    static const char cpu[] = "qwen3: CPU: lacks an instruction of this build, expected one like "
        "the one it was built on (" SIMD "); make builds for this one, make portable for all\n";
    static const char disk[] = "qwen3: model: can't be read any more, expected its files to stay "
        "as they are, found them cut or their disk failing\n";
    static atomic_flag said = ATOMIC_FLAG_INIT;
    while (atomic_flag_test_and_set(&said)) {}
    (void)!(signal == SIGILL ? write(STDERR_FILENO, cpu, sizeof(cpu) - 1)
                             : write(STDERR_FILENO, disk, sizeof(disk) - 1));
    _exit(EXIT_FAILURE);
}

// Runs before main. It is one call only, so that it has no instruction that this CPU may lack.
__attribute__((constructor)) static void catch_unknown_instructions(void) {
    signal(SIGILL, on_fatal);
}

#ifdef _WIN32
static BOOL WINAPI on_console_event(DWORD event) {
    return event == CTRL_C_EVENT && (on_interrupt(SIGINT), TRUE);
}

static void catch_signals(void) { SetConsoleCtrlHandler(on_console_event, TRUE); }
#else
static void catch_signals(void) {
    signal(SIGBUS, on_fatal);
    signal(SIGPIPE, SIG_IGN);
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt}, NULL);  // ends a read, too
}
#endif
