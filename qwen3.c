/* qwen3.c - Qwen3 inference in one C file: no packages, just libc, libm and threads. MIT license.

     ./qwen3 model.bin -i "What is the capital of France?"

   A token is a piece of text, often a word or a part of one. All tokens that a model knows are its
   vocabulary, and a token's number there is its id. A language model computes how likely each of
   them is to come next in a text. It computes with learned numbers, the weights: in training it
   predicted each next token of a great many texts, and the weights were changed little by little
   until it did this well. This program only uses them. It cuts a text, the prompt, into tokens
   (encode_raw, render) and runs each through the model (forward). Then it computes a number for
   each token of the vocabulary, higher for a likelier one (compute_logits), and draws one by these
   numbers (sample). It appends and writes it, and goes on from it until the answer ends (run_text).

   Inside the model, each token of the text is dim numbers: a vector x (dim), the residual stream.
   (A name is followed by its shape.) x begins as the token's row of the embedding table
   (vocab_size, dim). Layer after layer changes x twice. First a layer adds what attention finds in
   this token and those before it. Then it adds what a feed-forward network computes from the new x.
   (Some models have many such networks in a layer, its experts, and a router that chooses a few for
   each token.) For attention, matrices make of each token a query q, what it looks for; a key k,
   what it is found by; and a value v, what it gives to those that find it. The dot products of its
   query with the keys of all positions (places in the text) up to its own become shares that add up
   to 1 (softmax). The result is the sum of the values, each times its share. A layer does this in
   n_heads heads side by side. Each has its own query (head_dim), and so its own shares. But n_heads
   / n_kv_heads neighbours use one key and one value, a kv head (grouped-query attention): so fewer
   are kept. A token's x, q, k and v depend only on it and on those before it. So they stay right
   when tokens are appended, and need not run again: the KV cache keeps, for each layer and kv head,
   all keys K and values V so far (positions, head_dim). A query is not kept, because only its own
   token uses it. One layer computes

     h = rmsnorm(x, rms_att)                  rmsnorm(x, w) = w * x / sqrt(mean(x^2) + eps)
     q = Wq h, k = Wk h, v = Wv h             q: n_heads vectors (head_dim); k, v: n_kv_heads each
     q = rope(rmsnorm(q, q_norm), pos)        for each head; pos is the token's position
     k = rope(rmsnorm(k, k_norm), pos)
     K = [K; k], V = [V; v]                   k and v are appended to the KV cache
     a = softmax(q . K / sqrt(head_dim)) V    for each query head; softmax(z) = exp(z) / sum(exp(z))
     x = x + Wo a                             a: of all heads together (n_heads * head_dim)
     h = rmsnorm(x, rms_ffn)
     x = x + W2 (silu(W1 h) * (W3 h))         SwiGLU; silu(z) = z / (1 + exp(-z))
     (experts: see The feed-forward network)  W1, W3 are (hidden_dim, dim), W2 (dim, hidden_dim)

   Wq h is a matrix (out, in) times a vector (in). q . K are the dot products of q with the rows of
   K; shares times V is the sum of the rows of V, each times its share. u * v multiplies element by
   element. The embedding table, all W, rms_ and _norm are weights; eps is mostly 1e-6. One step is
   left out. Large matrices have 8 or 4 bits a weight. Before such a matrix, quantize rounds each
   number of a vector to 8 bits: h becomes Q8(h).

   x -+- norm, Q8, Wqkv, norm, rope, attention, Q8, Wo -(+)-+- norm, Q8, W1 W3, silu, Q8, W2 -(+) x
      '--------------------------------------------------'  '----------------------------------'

   In Qwen3-0.6B, dim is 1024 and hidden_dim 3072. It has 28 layers, each with 16 query heads and 8
   kv heads of head_dim 128: a position's keys and values take 2 * 28 * 8 * 128 * 4 = 229,376 bytes.

     Norm.    A layer reads a copy of x of steady magnitude (rmsnorm), and adds to x itself. So x
              can grow, and keeps what each layer added. The norms of q and k bound q . k (QK-norm).
     Scale.   q . k sums head_dim products, mostly of mixed signs. So its magnitude is about
              sqrt(head_dim) times that of one product. Dividing by this makes heads of any width
              alike. Else softmax could give nearly all to one position.
     Gate.    W1 is the gate: silu(W1 h) scales each element of W3 h. Without it, one matrix, the
              product of W2 and W3, could do the same.
     Order.   Without rope, a key would have the same share wherever it stands: see rope.

   Qwen3.5 has two kinds of layers. Every fourth one is as above, but rope turns a part of each head
   only, and a gate scales a (before Q8). The others, delta layers, compute a otherwise, without
   rope. They keep no keys and values, but a matrix for each head (and a little more), however long
   the text is; each token changes it (The delta rule).

   After the last layer come the logits,

     logits = Wcls rmsnorm(x, rms_final)      one for each token of the vocabulary

   softmax(logits) are probabilities p: how likely each token of the vocabulary comes next, after
   the token of x. So an answer's first token is drawn by the x of the prompt's last token. The
   logits of earlier tokens only tell how well the model predicts a given text. Its perplexity is
   exp(the mean of -log(p) of its tokens but the first): 20 if the model is as unsure as among 20
   equally likely tokens. A text's embedding is made of its last token's x (embed_text).

   To learn how a model runs, read Part I: run_layer, forward and run_text first, which lead to most
   of the rest, then from the top. It defines, in plain C, how one text runs, one token at a time,
   from its bytes to the answer's. What it only declares has a comment that says what it does. Part
   II, the program, runs many texts at once, in passes of many tokens: so weights are read once for
   all of these. Part III, the machine, computes a pass with threads and SIMD instructions. Together
   they give Part I's results bit for bit, in less time. `make plain` (-DPLAIN) builds a program
   that runs run_text, for tests, debuggers (break at run_layer) and other CPUs.
   .github/CONTRIBUTING.md says where each kind of change goes.

   Part I, the model              Part II, the program                      Part III, the machine
     Types, with their shapes       Errors and memory     Checks and notices    SIMD primitives
     Math                           The model file        Results, an answer    Vector math
     Quantization, matrix product   The tokenizer file    Turns                 The KV cache
     Embedding and rope             Unicode, merging      Lines of input        Threads
     Attention                      Forms                 Conversations         Workers
     The delta rule                 Modes, options        Starting a run        Matrix products
     The feed-forward network       Texts and places      JSON, rows            Attention
     The whole model                Many texts at once    Lists                 The delta rule
     Text to tokens                 Drafts, a pass, -K    Going on with a list  The work of a layer
     The sampler                    Writing, thinking     main                  The memory of a run
     The main loop                  Given answers                               POSIX and Windows
     The chat format                                                                            */

#if __SIZEOF_POINTER__ < 8 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "qwen3.c needs a 64-bit little-endian machine: models are mapped as they are"
#endif

#define VERSION "8.0"
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

#define INLINE static inline __attribute__((always_inline, unused))  // constant arguments fold away
static volatile sig_atomic_t interrupted;  // Ctrl-C was pressed

// Writes a line to stderr: "qwen3: WHERE: WHAT", mostly with what was expected and found. (Part II)
static void report(const char *fmt, ...);
#define die(...) (report(__VA_ARGS__), exit(EXIT_FAILURE))

INLINE int min_int(int a, int b) { return a < b ? a : b; }

// ------------------------------------------------------------------------------------------------
// Types, with their shapes: (rows, cols) = (out, in). Skim them and come back. HF is Hugging Face's
// Python library transformers (tests compare results with it); names on the right are its settings
// and tensors. A checkpoint is a model as its makers publish it: export.py makes our files.

typedef struct {
    int dim;                // width of the residual stream; HF hidden_size
    int hidden_dim;         // width of the feed-forward, or an expert; HF (moe_)intermediate_size
    int n_layers;
    int n_heads;            // query heads
    int n_kv_heads;         // key and value heads: n_heads / n_kv_heads query heads share one
    int vocab_size;         // ids, 151,936 in Qwen3-0.6B
    int max_seq_len;        // positions the model was made for; HF max_position_embeddings
    int head_dim;           // n_heads * head_dim need not be dim
    int shared_classifier;  // 1: Wcls is the token embedding; HF tie_word_embeddings
    int group_size;         // weights of a row with one scale; divides the cols of every Matrix
    int layer_bits;         // bits of a weight in the layers' matrices, 8 or 4; other matrices: 8
    int eight_bits;         // bit i set: matrix i of wq wk wv wo w1 w2 w3 wg has 8 nevertheless
    int panels;             // 1: the file has panels (see weight_int), 0: loading makes them
    int8_t levels[16];      // with 4 bits: each nibble's int8 (export.py's own: densest near 0)
    float rope_theta;
    float rms_norm_eps;
    int rope_scaling;       // not 0: rope is scaled for longer texts, by the next two
    float rope_factor;      // multiplies cos and sin: see rope_frequency
    const float *rope_freq; // (rotary_dim / 2) radians per position
    int qkv_bias;           // 1: Wq, Wk and Wv have biases (Qwen2)
    int no_qk_norm;         // 1: no QK-norm (Qwen2)
    int n_experts;          // 0: not a mixture of experts; HF num_experts
    int n_experts_used;     // by each token; HF num_experts_per_tok
    int no_topk_norm;       // 1: their shares need not add up to 1; HF norm_topk_prob = false
    int attention_every;    // layer l has attention if l + 1 is a multiple, else delta; 0: all have
    int delta_k_heads;      // of a delta layer: queries, and keys; HF linear_num_key_heads
    int delta_v_heads;      // values, and S; HF linear_num_value_heads
    int rotary_dim;         // elements of a head that rope rotates, the first ones; Qwen3: all
    int gated_attention;    // 1: attention has a gate, too; HF attn_output_gate
    int shared_expert;      // 1: one more expert, the last, runs for each token
    int q_dim;              // n_heads * head_dim
    int kv_dim;             // n_kv_heads * head_dim
    int delta_k_dim;        // delta_k_heads * DELTA_DIM
    int delta_v_dim;        // delta_v_heads * DELTA_DIM
    int delta_dim;          // of q, k and v of a delta layer together
    int n_kv_layers;        // layers with keys and values: those of attention
    int cache_bits;         // of a number in the KV cache, 32 or 8 (option -C 8)
} Config;  // Part II finds Weights by it. What a layer lacks is NULL in Layer, or has no rows

// A quantized matrix: see Quantization and the matrix product; for the order in memory, weight_int.
typedef struct {
    int rows, cols;
    int group_size;        // as in Config: consecutive weights of a row, a group, have one scale
    int bits;              // of a weight, 8 or 4
    const int8_t *bytes;   // (rows, cols * bits / 8)  8 bits: int8; 4: two weights in a byte
    const void *scales;    // (rows, cols / group_size)  8 bits: float; 4: see half_float
    const int8_t *levels;  // (16) with 4 bits         the int8 that a nibble stands for
} Matrix;

typedef struct {
    const float *rms_att;  // (dim)                       input_layernorm
    const float *rms_ffn;  // (dim)                       post_attention_layernorm
    const float *q_norm, *k_norm;  // (head_dim) or NULL  self_attn.q_norm, k_norm
    const float *bq;       // (q_dim) or NULL             self_attn.q_proj.bias
    const float *bk, *bv;  // (kv_dim) or NULL            self_attn.k_proj.bias, v_proj.bias
    Matrix wq;             // (q_dim, dim)                self_attn.q_proj
    Matrix wk, wv;         // (kv_dim, dim)               self_attn.k_proj, v_proj
    Matrix wg;             // (q_dim, dim) or no rows     self_attn.q_proj: each head's second half
    Matrix wo;             // (dim, q_dim)                self_attn.o_proj
    // A delta layer (HF linear_attn) has Wq, Wk (delta_k_dim, dim), Wv (delta_v_dim, dim), together
    // in_proj_qkv; Wg (delta_v_dim, dim), in_proj_z; Wo (dim, delta_v_dim), out_proj; and these:
    const float *conv;     // (PAST + 1, delta_dim) or NULL: attention   conv1d
    const float *forget;   // (delta_v_heads)             exp(A_log)
    const float *dt_bias;  // (delta_v_heads)             dt_bias
    const float *o_norm;   // (DELTA_DIM)                 norm (Qwen3.5's other norms: HF's + 1)
    const float *wa, *wb;  // (delta_v_heads, dim)        in_proj_a, in_proj_b
    // With experts, w1, w3 and w2 hold the rows of expert 0, then those of expert 1, and so on.
    Matrix w1, w3;         // (hidden_dim, dim)           mlp.gate_proj, up_proj
    Matrix w2;             // (dim, hidden_dim)           mlp.down_proj
    const float *router;   // (all_experts, dim) or NULL  mlp.gate, then mlp.shared_expert_gate
    int number;            // among layers of its kind: its place in the KV cache, or in State.delta
} Layer;

typedef struct {             // a new weight, here or in Layer, goes to take_weights, export.py and
                             // where it is used, in Parts I and III; a flag for it to take_header
    Matrix embedding;        // (vocab_size, dim)             model.embed_tokens
    Layer *layers;           // (n_layers)                    model.layers.N
    const float *rms_final;  // (dim)                         model.norm
    Matrix classifier;       // (vocab_size, dim)             lm_head, Wcls
} Weights;

typedef struct {   // a vector (cols) as int8 values, and a scale for each group: see Quantization
    int8_t *int8;  // (cols)
    float *scale;  // (cols / group_size)
} Q8;

// What changes while the model runs: KV cache, state of delta layers, vectors of one token.
typedef struct {
    float *x;          // (dim)           the residual stream, of the token that runs
    float *cos, *sin;  // (rotary_dim / 2)  see rope_angles; at the token's position
    float *h;          // (dim)           rmsnorm(x)
    Q8 h8;             // (dim)           Q8(h)
    float *q;          // (q_dim)         its queries; in a delta layer (delta_dim): its q, k and v
    float *a;          // (q_dim)         what its queries find; in a delta layer (delta_v_dim)
    float *a_gate;     // (as a)          Wg h
    Q8 a8;             // (as a)          Q8(a)
    float *gate;       // (hidden_dim)    W1 h, then silu(W1 h) * (W3 h)
    float *up;         // (hidden_dim)    W3 h
    Q8 gate8;          // (hidden_dim)    Q8(gate)
    float *router_out; // (all_experts)   Wr h, which choose_experts overwrites
    float *share;      // (all_experts)   the share of each chosen expert, and of a shared one
    float *y;          // (dim)           one expert's output
    float *out;        // (dim)           what is added to x
    float *logits;     // (vocab_size)
    float *keys, *values;  // (n_kv_layers, context, kv_dim)  the KV cache: all k and v so far
    float *delta;      // (n_layers - n_kv_layers, layer_state)  the state of the delta layers
} State;

// context: the most positions of a text, or of a piece of it that is scored (option -c)
typedef struct { Config config; Weights weights; State state; int context; } Model;

// ------------------------------------------------------------------------------------------------
// Math: what a layer computes on one vector. (Part III, Vector math, has what is only declared.)
//
// Equal bits: a sum of floats depends on the order of its terms. So each sum has one order here,
// which Part III keeps: a text's results never depend on threads, on how many tokens run together
// or on other texts. They depend on the build (see mul_add) and on libm (powf, cosf, log1pf ..).

// a * b + c, rounded once if the build has fma, else twice. Nothing else fuses (-ffp-contract=off).
static float mul_add(float a, float b, float c);

// exp(x) within 2 ulp, exactly 1 for 0; but 0 below about -87.683, exp(88) above 88, NaN for NaN
static float fast_exp(float x);

// The largest of x (n > 0; anything if one is NaN); the largest |x|, or NaN if one is NaN
static float max_of(const float *x, int n);
static float max_abs(const float *x, int n);

// The float with these 16 bits: 1 of sign, 5 of exponent, 10 of fraction (IEEE 754 half precision)
static float half_float(uint16_t half);

// sum(x) or sum(x^2), x (n). Element i goes to partial sum i % 16; then their upper half is added
// to the lower, four times: the same order whether a CPU adds 4, 8 or 16 floats at once.
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

// out = w * x / sqrt(mean(x^2) + eps), all (n), if sum(x^2) is finite: HF Qwen3RMSNorm
static void rmsnorm(float *out, const float *x, const float *w, int n, float eps) {
    float inverse = 1 / sqrtf(sum_of(x, n, true) / n + eps);
    for (int i = 0; i < n; i++) out[i] = w[i] * (x[i] * inverse);
}

// Replaces x (n) by exp(x - max) and returns the sum: dividing by it completes the softmax. `max`
// is the largest x, or more. The factor exp(-max) cancels, but keeps each term from overflow.
static float softmax_terms(float *x, int n, float max) {
    for (int i = 0; i < n; i++) x[i] = fast_exp(x[i] - max);
    return sum_of(x, n, false);
}

INLINE float sigmoid(float z) { return 1 / (1 + fast_exp(-z)); }
INLINE float silu(float z) { return z / (1 + fast_exp(-z)); }  // z sigmoid(z)

// gate = silu(gate) * up, all (n): HF Qwen3MLP
static void silu_times(float *gate, const float *up, int n) {
    for (int i = 0; i < n; i++) gate[i] = silu(gate[i]) * up[i];
}

// ------------------------------------------------------------------------------------------------
// Quantization and the matrix product. For one token, reading the weights takes longer than Part
// III's arithmetic. So all matrices but a few small ones are quantized: they take fewer bytes.
//
// With 8 bits, the weights of a group (32 to 256 consecutive ones of a row) are stored as int8
// values and a float scale: a weight is its int8 times the scale. The layers' matrices may have 4
// bits: then a weight is levels[its 4 bits], one of the file's 16 int8 values, times a scale of 16
// bits. Before a vector is multiplied with such a matrix, it is quantized, too, always to 8 bits,
// in groups of this size. So the dot product of a group of weights and one of the vector is a sum
// of integers, at most 256 * 128 * 127 < 2^22, exact even as a float, times the two scales.

// Returns weight i of row r without its scale. With 8 bits it is byte i of the row.
// With 4, byte j of a group's group_size / 2 bytes has its weights j (low nibble) and j +
// group_size / 2 (high). SIMD instructions compute 4 to 16 rows at once. So in memory 16
// rows are together, a panel (the last one is padded). It begins with word column 0, the first
// word (4 bytes) of each row; then comes word column 1, the second one of each, and so on:
//   row 0, word 0 | row 1, word 0 | ... | row 15, word 0 | row 0, word 1 | row 1, word 1 | ...
// For example, rows have 128 weights of 4 bits in groups of 64, so 16 words. Weight (17, 70) is in
// row 1 of panel 1, and there weight 6 of group 1: the low nibble of byte 32 + 6, byte 2 of word 9.
// In the matrix this is byte 16 * 64 (panel 0) + 9 * 16 * 4 (word columns) + 4 (row 0's word) + 2
// = 1606; its scale is number (1 * 2 + 1) * 16 + 1 = 49.
enum { PANEL = 16 };

INLINE int weight_int(const Matrix *w, int r, int i) {
    const int half = w->group_size / 2, g = i / w->group_size, j = i % w->group_size;
    const int at = w->bits == 8 ? i : g * half + j % half;  // the byte of the row
    // word columns before this one: of the panels before, and of this panel
    const size_t columns = (size_t)(r / PANEL) * (w->cols * w->bits / 32) + at / 4;
    const int8_t byte = w->bytes[(columns * PANEL + r % PANEL) * 4 + at % 4];
    return w->bits == 8 ? byte : w->levels[(j < half ? byte : byte >> 4) & 15];
}

// Returns the scale of group g of row r. A panel has 16 scales of group 0, 16 of group 1, ...
INLINE float weight_scale(const Matrix *w, int r, int g) {
    const size_t at = ((size_t)(r / PANEL) * (w->cols / w->group_size) + g) * PANEL + r % PANEL;
    return w->bits == 8 ? ((const float *)w->scales)[at]
                        : half_float(((const uint16_t *)w->scales)[at]);
}

// out = Q8(x), x (n). The scale of a group is max|x| / 127, and its values are x * (127 / max|x|),
// rounded to the nearest integer, ties to even (rintf): so an error is at most about half a scale.
// Where the scale would be below the smallest normal number, all is 0. Where x has a NaN or
// infinity, that is the scale, and the values are 0: so every product with the group is NaN.
static void quantize(Q8 out, const float *x, int n, int group_size) {
    for (int g = 0; g < n / group_size; g++, x += group_size) {
        const float max = max_abs(x, group_size);
        out.scale[g] = max < FLT_MIN * 127 ? 0 : max / 127;
        const float inverse = out.scale[g] != 0 ? 127 / max : 0;
        for (int i = 0; i < group_size; i++) {
            out.int8[g * group_size + i] = isfinite(max) ? (int8_t)rintf(x[i] * inverse) : 0;
        }
    }
}

// Returns W[r] . x, row r of W (rows, cols) times x (cols). The products of a group are added as
// integers, the groups as floats, from the first to the last.
static float dot_row(const Matrix *w, int r, Q8 x) {
    float sum = 0;
    for (int g = 0; g < w->cols / w->group_size; g++) {
        int dot = 0;
        for (int i = g * w->group_size; i < (g + 1) * w->group_size; i++) {
            dot += weight_int(w, r, i) * x.int8[i];
        }
        sum = mul_add((float)dot * weight_scale(w, r, g), x.scale[g], sum);
    }
    return sum;
}

// out = W x. W is `rows` rows of the matrix, from row `first` on: all rows, or those of one expert.
static void matmul(float *out, const Matrix *w, int first, int rows, Q8 x) {
    for (int i = 0; i < rows; i++) out[i] = dot_row(w, first + i, x);
}

static void add(float *x, const float *y, int n) {
    for (int i = 0; i < n; i++) x[i] += y[i];
}

// ------------------------------------------------------------------------------------------------
// Embedding and rope: a token's first x, and what tells the layers its position
//
// rope rotates each pair (q[j], q[j + rotary_dim/2]), j < rotary_dim/2, by the angle pos *
// theta^(-2j / rotary_dim), and k in the same way. Turning both back by k's angle does not change
// q . k. Then k is as it was, and q is turned by the angle of their distance.
// So of their positions only the distance counts. Pair 0 turns by 1 radian a position, nearly
// once round in 6: it tells neighbours apart. Slower ones tell near from far: the last of 64, with
// a theta of 1e6, is 806,000 times as slow, and turns by 3 degrees in 40,960 positions.

// Returns the frequency of pair j in radians per position. If rope is scaled for texts longer than
// in training, the file has other frequencies. By YaRN (arXiv 2309.00071) the slowest pairs turn
// so much slower that they go round no further than in training, and the fastest as before. More
// positions make a softmax flatter. Against this, a factor on cos and sin makes q . k larger.
static float rope_frequency(const Config *c, int j) {
    return c->rope_scaling ? c->rope_freq[j] : 1 / powf(c->rope_theta, 2.0f * j / c->rotary_dim);
}

// Computes cos and sin (rotary_dim / 2) of the angles at a position.
static void rope_angles(const Config *c, int pos, float *cos, float *sin) {
    const float factor = c->rope_scaling ? c->rope_factor : 1;
    for (int j = 0; j < c->rotary_dim / 2; j++) {
        const float angle = (float)pos * rope_frequency(c, j);
        cos[j] = cosf(angle) * factor;
        sin[j] = sinf(angle) * factor;
    }
}

// Rotates each pair (x[j], x[j + half]), j < half, of one head x: HF apply_rotary_pos_emb
static void rope(float *x, const float *cos, const float *sin, int half) {
    for (int j = 0; j < half; j++) {
        float a = x[j], b = x[j + half];
        x[j] = a * cos[j] - b * sin[j];
        x[j + half] = b * cos[j] + a * sin[j];
    }
}

// x (dim) = the token's row of the embedding table
static void embed(const Model *m, int token, float *x) {
    const Matrix *table = &m->weights.embedding;
    for (int i = 0; i < table->cols; i++) {
        x[i] = weight_int(table, token, i) * weight_scale(table, token, i / table->group_size);
    }
}

// ------------------------------------------------------------------------------------------------
// Attention. Up to compute_logits, a function with a Model works on the token's vectors in State:
// where its comment says h, it is m->state.h. l is the layer's index, pos the token's position.

// Returns where a key or value (head_dim) is in `cache` (State.keys or State.values).
static float *in_cache(const Model *m, float *cache, int l, int pos, int kv_head) {
    const Config *c = &m->config;
    const size_t at = (size_t)m->weights.layers[l].number * m->context + pos;
    return cache + at * c->kv_dim + kv_head * c->head_dim;
}

// h = rmsnorm(x, w), h8 = Q8(h)
static void norm_and_quantize(Model *m, const float *w) {
    const Config *c = &m->config;
    State *s = &m->state;
    rmsnorm(s->h, s->x, w, c->dim, c->rms_norm_eps);
    quantize(s->h8, s->h, c->dim, c->group_size);
}

// x (head_dim), one head's q or k, becomes rope(rmsnorm(x)); without weights w, rope(x).
static void norm_and_rope(const Config *c, float *x, const float *w, const float *cos,
                          const float *sin) {
    if (w) rmsnorm(x, x, w, c->head_dim, c->rms_norm_eps);
    rope(x, cos, sin, c->rotary_dim / 2);
}

// For option -C 8, rounds x (n), a k or v, to what Part III's KV cache keeps: an int8 for each
// number and a float scale for each 16. They take 20 bytes, not 64. A bias, if not NULL, is
// subtracted first: Qwen2.5's bk is huge in slow pairs of rope, and k less bk rounds finer. (If all
// k lose one vector, all scores of a q lose one number: its shares stay.)
static void round_to_int8(float *x, const float *bias, int n) {
    int8_t int8[16];
    float scale;
    for (int i = 0; i < n; i += 16) {
        for (int j = 0; j < 16; j++) x[i + j] -= bias ? bias[i + j] : 0;
        quantize((Q8){int8, &scale}, x + i, 16, 16);
        for (int j = 0; j < 16; j++) x[i + j] = int8[j] * scale;
    }
}

// q = rope(rmsnorm(Wq h8)), k = rope(rmsnorm(Wk h8)), v = Wv h8; k and v are made in the cache.
// Qwen2 and Qwen2.5 have biases, not norms: q = rope(Wq h8 + bq), k alike, v = Wv h8 + bv.
static void qkv(Model *m, int l, int pos) {
    const Config *c = &m->config;
    const Layer *layer = &m->weights.layers[l];
    State *s = &m->state;
    float *q = s->q, *k = in_cache(m, s->keys, l, pos, 0), *v = in_cache(m, s->values, l, pos, 0);
    matmul(q, &layer->wq, 0, c->q_dim, s->h8);
    matmul(k, &layer->wk, 0, c->kv_dim, s->h8);
    matmul(v, &layer->wv, 0, c->kv_dim, s->h8);
    if (layer->bq) {
        add(q, layer->bq, c->q_dim);
        add(k, layer->bk, c->kv_dim);
        add(v, layer->bv, c->kv_dim);
    }
    for (int i = 0; i < c->n_heads; i++)
        norm_and_rope(c, q + i * c->head_dim, layer->q_norm, s->cos, s->sin);
    for (int i = 0; i < c->n_kv_heads; i++)
        norm_and_rope(c, k + i * c->head_dim, layer->k_norm, s->cos, s->sin);
    if (c->cache_bits != 8) return;
    round_to_int8(k, layer->bk, c->kv_dim);
    round_to_int8(v, NULL, c->kv_dim);
}

// Returns q . k / sqrt(head_dim), both (head_dim), added in order of j.
static float attention_score(const float *q, const float *k, int head_dim) {
    float dot = 0;
    for (int j = 0; j < head_dim; j++) dot = mul_add(k[j], q[j], dot);
    return dot * (1 / sqrtf((float)head_dim));
}

// Attention of one query head: a = softmax(q . K / sqrt(head_dim)) V, with K and V (pos + 1,
// head_dim): a token sees itself and those before it (causal). exp(score) itself could be
// infinite. So `total` sums exp(score - largest), where `largest` is the largest score, and the
// array `a` sums the values, each times this. Last, `a` is multiplied by 1 / total.
//
// The positions come in spans, so that the array `score` is short. (Other spans round otherwise.) A
// text of up to 256 tokens is one span, and `keep` only multiplies zeros. In longer ones, each span
// may raise `largest`: total and `a` so far are then multiplied by keep = exp(before - largest).
enum { SPAN = 256 };

static void attend(Model *m, int l, int head, int pos) {
    const Config *c = &m->config;
    const int head_dim = c->head_dim, kv_head = head / (c->n_heads / c->n_kv_heads);
    const State *s = &m->state;
    const float *q = s->q + head * head_dim;
    float *a = s->a + head * head_dim;
    float score[SPAN], largest = -FLT_MAX, total = 0;
    memset(a, 0, head_dim * sizeof(float));
    for (int start = 0; start <= pos; start += SPAN) {
        const int n = min_int(SPAN, pos + 1 - start);
        for (int i = 0; i < n; i++) {
            score[i] = attention_score(q, in_cache(m, s->keys, l, start + i, kv_head), head_dim);
        }
        const float before = largest;
        largest = fmaxf(largest, max_of(score, n));
        const float keep = fast_exp(before - largest);
        const float terms = softmax_terms(score, n, largest);  // score[i] = exp(score[i] - largest)
        total = mul_add(total, keep, terms);
        for (int j = 0; j < head_dim; j++) {
            float sum = 0;
            for (int i = 0; i < n; i++) {
                sum = mul_add(in_cache(m, s->values, l, start + i, kv_head)[j], score[i], sum);
            }
            a[j] = mul_add(a[j], keep, sum);
        }
    }
    for (int j = 0; j < head_dim; j++) a[j] *= 1 / total;
}

// a = attention of all heads; with a gate (Qwen3.5), each a[i] is then times sigmoid(Wg h8)[i]
static void run_attention(Model *m, int l, int pos) {
    const Config *c = &m->config;
    const Matrix *wg = &m->weights.layers[l].wg;
    State *s = &m->state;
    qkv(m, l, pos);                // q = rope(rmsnorm(Wq h8)); k, v go to the cache
    for (int head = 0; head < c->n_heads; head++) {
        attend(m, l, head, pos);   // a = softmax(q . K / sqrt(head_dim)) V
    }
    matmul(s->a_gate, wg, 0, wg->rows, s->h8);
    for (int i = 0; i < wg->rows; i++) s->a[i] *= sigmoid(s->a_gate[i]);
}

// ------------------------------------------------------------------------------------------------
// The delta rule (Gated DeltaNet, arXiv 2412.06464; HF Qwen3_5GatedDeltaNet): skip it for Qwen3.
//
// A delta layer has a matrix S (DELTA_DIM, DELTA_DIM) for each value head, a memory of pairs of key
// and value. Row i of S belongs to element i of keys: what S has for a key k is S^T k, the sum of
// k[i] times row i. For each token, S is first multiplied by g: it forgets. Then d is a share b of
// the difference (delta) between the token's value and what S now has for its key; and k[i] d is
// added to row i. So S^T k grows by d (if |k| is 1), and S^T c by (k . c) d for a key c. Last, a is
// what S has for q. In place of lines q to a, such a layer computes
//
//   u = [Wq h; Wk h; Wv h]                   delta_k_heads q and k, delta_v_heads v (DELTA_DIM)
//   [q; k; v] = silu(conv[0] * u3 + conv[1] * u2 + conv[2] * u1 + conv[3] * u)
//              u1, u2, u3: u of the token 1, 2, 3 before. So q, k and v see 4 tokens
//   q = q / |q| / sqrt(DELTA_DIM), k = k / |k|    for each head (see make_unit)
//   g = exp(-forget * softplus(Wa h + dt_bias))   softplus(z) = log(1 + exp(z))
//   b = sigmoid(Wb h)                        each value head has one g and one b, from 0 to 1
//   d = b * (v - g S^T k)                    each q and k serve delta_v_heads / delta_k_heads v
//   S = g S + k d^T                          (k d^T)[i][j] = k[i] * d[j]
//   a = rmsnorm(S^T q, o_norm) * silu(Wg h)    with this new S
//
// All S and the last three u, at first 0, are a text's state. A token overwrites it: no going back.

enum { DELTA_DIM = 128, PAST = 3 };  // of a head; tokens that the convolution sees before its own

// Floats of the state in one layer: S of each value head, then u3, u2, u1 of each q, k and v head.
// Qwen3.5-0.8B's layers together have 5,050,368 (20 MB), however long the text is.
static size_t layer_state(const Config *c) {
    return (size_t)DELTA_DIM * c->delta_v_dim + PAST * c->delta_dim;
}

// A head's u becomes silu of its convolution; past (u3 u2 u1) becomes u2 u1 u. conv: 4 rows of n
static void convolve(float *restrict u, float *restrict past, const float *restrict conv, int n) {
    float *u3 = past, *u2 = u3 + DELTA_DIM, *u1 = u2 + DELTA_DIM;
    const float *conv1 = conv + n, *conv2 = conv1 + n, *conv3 = conv2 + n;
    for (int i = 0; i < DELTA_DIM; i++) {
        const float now = u[i], before = mul_add(conv1[i], u2[i], conv[i] * u3[i]);
        u[i] = silu(mul_add(conv3[i], now, mul_add(conv2[i], u1[i], before)));
        u3[i] = u2[i];
        u2[i] = u1[i];
        u1[i] = now;
    }
}

// x (DELTA_DIM) = x * scale / sqrt(x . x + 1e-6): |x| becomes scale (0.7 of it if |x| was 0.001).
static void make_unit(float *x, float scale) {
    const float inverse = scale / sqrtf(dot_of(x, x, DELTA_DIM) + 1e-6f);
    for (int i = 0; i < DELTA_DIM; i++) x[i] *= inverse;
}

// Computes g and b of a value head. wa and wb are not quantized: so h is not, either.
static void rates_of(const Layer *layer, const float *h, int dim, int head, float *g, float *b) {
    const float *wa = layer->wa + (size_t)head * dim, *wb = layer->wb + (size_t)head * dim;
    const float z = dot_of(wa, h, dim) + layer->dt_bias[head];
    *g = fast_exp(-layer->forget[head] * (z > 20 ? z : log1pf(fast_exp(z))));
    *b = sigmoid(dot_of(wb, h, dim));
}

// The delta rule for n columns (here all) of a head's S (DELTA_DIM, n): S changes, a (n) = S^T q.
INLINE void learn(float *restrict S, const float *q, const float *k, const float *v, float g,
                  float b, float *restrict a, const int n) {
    float d[DELTA_DIM] = {0};
    for (int i = 0; i < DELTA_DIM; i++)
        for (int j = 0; j < n; j++) d[j] = mul_add(S[i * n + j], k[i], d[j]);
    for (int j = 0; j < n; j++) d[j] = b * (v[j] - g * d[j]);
    memset(a, 0, n * sizeof(float));
    for (int i = 0; i < DELTA_DIM; i++) {
        for (int j = 0; j < n; j++) {
            float *s = &S[i * n + j];
            *s = mul_add(k[i], d[j], g * *s);
            a[j] = mul_add(*s, q[i], a[j]);
        }
    }
}

// a (DELTA_DIM) = rmsnorm(a, o_norm) * silu(gate)
static void norm_and_gate(const Config *c, const Layer *layer, float *a, const float *gate) {
    rmsnorm(a, a, layer->o_norm, DELTA_DIM, c->rms_norm_eps);
    for (int i = 0; i < DELTA_DIM; i++) a[i] *= silu(gate[i]);
}

static void run_delta(Model *m, int l, int pos) {
    const Config *c = &m->config;
    const Layer *layer = &m->weights.layers[l];
    State *s = &m->state;
    const int per_k = c->delta_v_heads / c->delta_k_heads;
    float *q = s->q, *k = q + c->delta_k_dim, *v = k + c->delta_k_dim;
    float *S = s->delta + layer->number * layer_state(c), *past = S + DELTA_DIM * c->delta_v_dim;
    if (pos == 0) memset(S, 0, layer_state(c) * sizeof(float));
    matmul(q, &layer->wq, 0, c->delta_k_dim, s->h8);
    matmul(k, &layer->wk, 0, c->delta_k_dim, s->h8);
    matmul(v, &layer->wv, 0, c->delta_v_dim, s->h8);
    matmul(s->a_gate, &layer->wg, 0, c->delta_v_dim, s->h8);
    for (int i = 0; i < c->delta_dim; i += DELTA_DIM) {
        convolve(q + i, past + PAST * i, layer->conv + i, c->delta_dim);  // past: its u3, u2, u1
        if (i < c->delta_k_dim) make_unit(q + i, 1 / sqrtf(DELTA_DIM));
        else if (i < 2 * c->delta_k_dim) make_unit(q + i, 1);
    }
    for (int head = 0; head < c->delta_v_heads; head++) {
        const int i = head * DELTA_DIM, from = head / per_k * DELTA_DIM;
        float g, b;
        rates_of(layer, s->h, c->dim, head, &g, &b);
        learn(S + i * DELTA_DIM, q + from, k + from, v + i, g, b, s->a + i, DELTA_DIM);
        norm_and_gate(c, layer, s->a + i, s->a_gate + i);
    }
}

// ------------------------------------------------------------------------------------------------
// The feed-forward network, and a mixture of experts (HF Qwen3MoeSparseMoeBlock)
//
// A mixture of experts has a router Wr, and each expert its own W1, W2 and W3: so a model has many
// weights, and a token needs few of them. In place of x = x + W2 (silu(W1 h) * (W3 h)), it computes
//
//   share = softmax(Wr h)                    for each expert; Wr and this h are floats
//   chosen = the n_experts_used experts with the largest shares
//   share = share / (sum over the chosen)    so that they add up to 1; some models skip this
//   x = x + sum of share[i] W2[i] (silu(W1[i] h) * (W3[i] h)) over the chosen i
//
// Qwen3.5's mixture has a shared expert, too, the last: always added, with sigmoid(its Wr h).

// out (dim) = W2 Q8(silu(W1 h8) * (W3 h8)), each W that of `expert` (0 if there are no experts).
static void feed_forward(Model *m, const Layer *layer, int expert, float *out) {
    const int dim = m->config.dim, hidden_dim = m->config.hidden_dim;
    State *s = &m->state;
    matmul(s->gate, &layer->w1, expert * hidden_dim, hidden_dim, s->h8);
    matmul(s->up, &layer->w3, expert * hidden_dim, hidden_dim, s->h8);
    silu_times(s->gate, s->up, hidden_dim);
    quantize(s->gate8, s->gate, hidden_dim, m->config.group_size);
    matmul(out, &layer->w2, expert * dim, dim, s->gate8);
}

static int all_experts(const Config *c) { return c->n_experts + c->shared_expert; }

// Computes share (all_experts): of the chosen experts (of equal ones the lower number) and of a
// shared one; of others 0. term (all_experts) is Wr h, and is overwritten. Unless no_topk_norm,
// softmax's own sum cancels. If that sum is NaN, all shares are 0, and the result is false.
static bool choose_experts(const Config *c, float *term, float *share) {
    const float all = softmax_terms(term, c->n_experts, max_of(term, c->n_experts));
    float chosen = 0;
    memset(share, 0, all_experts(c) * sizeof(float));
    if (isnan(all)) return false;
    for (int i = 0; i < c->n_experts_used; i++) {
        int best = 0;
        for (int e = 1; e < c->n_experts; e++) best = term[e] > term[best] ? e : best;
        share[best] = term[best];
        chosen += term[best];
        term[best] = -1;  // less than all terms: chosen once
    }
    for (int e = 0; e < c->n_experts; e++) share[e] /= c->no_topk_norm ? all : chosen;
    if (c->shared_expert) share[c->n_experts] = sigmoid(term[c->n_experts]);
    return true;
}

// out = the sum of share[e] times expert e's output, e ascending. What has no share is not read.
static void run_experts(Model *m, const Layer *layer) {
    const int dim = m->config.dim, n_experts = all_experts(&m->config);
    State *s = &m->state;
    for (int e = 0; e < n_experts; e++) {
        s->router_out[e] = dot_of(layer->router + (size_t)e * dim, s->h, dim);
    }
    const bool chosen = choose_experts(&m->config, s->router_out, s->share);
    memset(s->out, 0, dim * sizeof(float));
    for (int e = 0; e < n_experts; e++) {
        if (s->share[e] == 0) continue;
        feed_forward(m, layer, e, s->y);
        for (int i = 0; i < dim; i++) s->out[i] += s->share[e] * s->y[i];
    }
    if (!chosen) s->out[0] = NAN;  // rmsnorm of this x spreads it: NaN logits end the answer
}

// ------------------------------------------------------------------------------------------------
// The whole model, for one token

// Runs layer l: x of the token at pos becomes x + attention (or delta rule), then x + feed-forward.
// (A new kind of layer also goes to KIND, where weights are read; to layer_all, Part III; and what
// it keeps of a text to State and layer_state.)
static void run_layer(Model *m, int l, int pos) {
    const Config *c = &m->config;
    const Layer *layer = &m->weights.layers[l];
    State *s = &m->state;

    norm_and_quantize(m, layer->rms_att);     // h = rmsnorm(x), h8 = Q8(h)
    if (layer->conv) run_delta(m, l, pos);    // a delta layer: a = rmsnorm(S^T q) * silu(Wg h8)
    else run_attention(m, l, pos);            // a = softmax(q . K / sqrt(head_dim)) V
    quantize(s->a8, s->a, layer->wo.cols, c->group_size);
    matmul(s->out, &layer->wo, 0, c->dim, s->a8);  // out = Wo a8 (0: from its row 0 on)
    add(s->x, s->out, c->dim);                // x = x + out

    norm_and_quantize(m, layer->rms_ffn);
    if (layer->router) run_experts(m, layer); // out = the chosen experts' outputs, by share
    else feed_forward(m, layer, 0, s->out);   // out = W2 Q8(silu(W1 h8) * (W3 h8))
    add(s->x, s->out, c->dim);                // x = x + out
}

// Runs a token of a text through all layers, after the tokens before. Then x is the last layer's
// output, and the KV cache and the state of delta layers have the token. False: Ctrl-C stopped it.
static bool forward(Model *m, int token, int pos) {
    embed(m, token, m->state.x);
    rope_angles(&m->config, pos, m->state.cos, m->state.sin);
    for (int l = 0; l < m->config.n_layers; l++) {
        if (interrupted) return false;
        run_layer(m, l, pos);
    }
    return true;
}

// Returns logits (vocab_size) = Wcls Q8(rmsnorm(x, rms_final)), of the token that has run last.
static float *compute_logits(Model *m) {
    State *s = &m->state;
    norm_and_quantize(m, m->weights.rms_final);
    matmul(s->logits, &m->weights.classifier, 0, m->config.vocab_size, s->h8);
    return s->logits;
}

// ------------------------------------------------------------------------------------------------
// Text to tokens. Added tokens were put into the vocabulary by hand. Those that the chat template
// writes, all <|...|> and all that HF calls special are marks: <|im_start|> begins a message. The
// others are words. Raw text is cut at both kinds, a user's message only at words. What is between
// two gets Unicode's NFC: e and a combining accent (U+0301) become one letter (U+00E9), so both
// spellings get equal ids. Then a regular expression makes pieces, mostly words with the space
// before them: "Hello, world" is "Hello" "," " world", Qwen3's 9707 11 1879. Byte-pair encoding
// takes each piece alone: at first each byte is a token. A merge makes one token of two neighbours,
// if their bytes together are a token that merges make. The merge of the highest priority is next:
// l o w e r -> l o w er -> l ow er -> l ower -> lower. Vocabulary and priorities were made before
// training, from the most frequent pairs of its texts. A model only knows texts cut so.

typedef struct { const uint8_t *p; size_t n; } Bytes;  // owned elsewhere; no NUL ends a text
typedef struct { uint8_t *p; size_t n, cap; } Buffer;  // bytes that grow: p has room for `cap`
typedef struct { int *p; size_t n, cap; } Ids;         // token ids that grow

// Part II
static void buffer_add(Buffer *b, Bytes text);  // appends a copy of the text
static void ids_add(Ids *ids, int id);          // appends the id

static Bytes bytes_of(const Buffer *b) { return (Bytes){b->p, b->n}; }

static Bytes bytes_from(Bytes b, size_t start) {  // b.p may be NULL if `start` is 0
    return (Bytes){start ? b.p + start : b.p, b.n - start};
}

enum { OTHER, LETTER, NUMBER, SPACE, END };  // classes of characters; END: after the text
enum { SYSTEM, USER, ASSISTANT };  // who wrote a message

typedef struct {           // the texts around a chat's messages: skip it until The chat format
    Bytes start;           // before all else
    Bytes no_system[2];    // then, if message 0 is not SYSTEM: [0] not to think, [1] to think
    Bytes open[3];         // before a message, by role
    Bytes close[3];        // after it
    Bytes answer_open[2];  // in place of open before a new answer: [0] not to think, [1] to think
} ChatFormat;

typedef struct Tokenizer {
    int vocab_size;          // that of Config, from which tokenizer_load gets it
    Bytes *text;             // (vocab_size)
    float *priority;         // (vocab_size) of the merge that makes the token: higher ones first
    uint8_t *kind;           // (vocab_size) is it added, does output show it: see ADDED, Part II
    int end_of_text;         // <|endoftext|>
    int think;               // <think>: begins a model's thinking; -1: there is none
    int end_think;           // </think>: ends it; -1
    Ids prefix;              // put before every raw text
    Ids suffix;              // and after it (but not before -o @NAME's answers)
    Ids stop;                // each ends an answer
    ChatFormat chat;
    struct Tables *tables;   // what else the file has (Part II)
} Tokenizer;

typedef struct {  // one character of a text
    uint32_t c;   // code point; a byte that is not valid UTF-8 gets a number above all of them
    int n;        // its bytes; 0 after the text
    int class;    // OTHER, LETTER, NUMBER, SPACE or END
} Char;

// Returns the character at offset `at` of a text, or after its end 0 bytes of class END. (Part II)
static Char char_at(const Tokenizer *tok, Bytes text, size_t at);

// Returns the end of the run of characters of one class that begins at `at`.
static size_t run_end(const Tokenizer *tok, Bytes text, size_t at, int class) {
    for (Char c; (c = char_at(tok, text, at)).class == class;) at += c.n;
    return at;
}

// Returns the length of (?i:'s|'t|'re|'ve|'m|'ll|'d) at the start of the text, or 0. When case is
// ignored, the long s (U+017F) counts as an s.
static size_t contraction(Bytes text) {
    static const char *const all[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'\u017F"};
    for (int i = 0; i < 8; i++) {
        size_t n = strlen(all[i]);
        if (n <= text.n && strncasecmp((const char *)text.p, all[i], n) == 0) return n;
    }
    return 0;
}

INLINE bool is_newline(uint32_t c) { return c == '\n' || c == '\r'; }

// Returns the length of the white space at the start of the text that is one piece. With a newline:
// up to the last one. Else, if several characters are here and text follows: all but the last.
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

// Returns the length of the first piece of a nonempty text, by Qwen's regular expression. Of its
// seven alternatives the first that matches wins. (\p{L} is a letter, \p{N} a numeric character, \s
// white space; (?!\S): the next character is white space or none.) "it's 2024" becomes "it"
// "'s" " " "2" "0" "2" "4". Qwen3.5's has [\p{L}\p{M}]+ for \p{L}+: its file has \p{M} as LETTER.
//
//   1   (?i:'s|'t|'re|'ve|'m|'ll|'d)
//   2   [^\r\n\p{L}\p{N}]?\p{L}+           letters, after at most one other character
//   3   \p{N}                              one numeric character
//   4   [ ]?[^\s\p{L}\p{N}]+[\r\n]*        others, after at most one space; newlines after them
//   5-7 \s*[\r\n]+  or  \s+(?!\S)  or  \s+   white space: see space_length
static size_t piece_length(const Tokenizer *tok, Bytes text) {
    size_t end = contraction(text);
    if (end) return end;                                                             // 1
    Char a = char_at(tok, text, 0), b = char_at(tok, text, a.n);  // the first two characters
    bool may_lead = a.class != NUMBER && !is_newline(a.c);        // the letters of 2
    if (a.class == LETTER || (may_lead && b.class == LETTER))
        return run_end(tok, text, a.n, LETTER);                                      // 2
    if (a.class == NUMBER) return a.n;                                               // 3
    if (a.class == SPACE && !(a.c == ' ' && b.class == OTHER))  // not the one space of 4
        return space_length(tok, text);                                              // 5-7
    for (end = run_end(tok, text, a.n, OTHER); end < text.n && is_newline(text.p[end]); end++) {}
    return end;                                         // 4: a is OTHER, or a space before one
}

typedef struct {     // text arrives in parts, some of which may hold added tokens
    const Tokenizer *tok;
    Ids *out;
    Buffer pending;  // not encoded yet: its last piece or letter (NFC) may go on in the next part
} Encoder;

// Appends the text in form NFC, or as it is if the file has no data for it. (Part II)
static void normalize(const Tokenizer *tok, Buffer *out, Bytes text);

// Returns the token with exactly these bytes, or -1: if `added`, an added one, else a single byte's
// (every byte has one) or one that merges make. (Part II: a hash table)
static int token_find(const Tokenizer *tok, Bytes text, bool added);

// Appends the tokens of a piece. Of pairs with equal priorities the leftmost is merged first.
static void encode_piece(const Tokenizer *tok, Bytes s, Ids *out) {
    const size_t first = out->n;
    for (size_t i = 0; i < s.n; i++) ids_add(out, token_find(tok, (Bytes){s.p + i, 1}, false));
    while (!interrupted) {
        int *best = NULL, merged = -1;  // the pair of the highest priority, and what it makes
        Bytes both = s;                 // the bytes of a pair in s
        for (int *pair = out->p + first; pair + 1 < out->p + out->n; pair++) {
            both.n = tok->text[pair[0]].n + tok->text[pair[1]].n;
            const int id = token_find(tok, both, false);
            both.p += tok->text[pair[0]].n;
            if (id < 0 || (best && tok->priority[id] <= tok->priority[merged])) continue;
            best = pair;
            merged = id;
        }
        if (!best) break;
        *best = merged;
        out->n--;
        for (int *id = best + 1; id < out->p + out->n; id++) id[0] = id[1];
    }
}

// Calls encode_piece with -DPLAIN, else does the same in n log n steps in place of n^2. (Part II)
static void merge_piece(const Tokenizer *tok, Bytes piece, Ids *out);

// Encodes the plain text that has arrived. After Ctrl-C ids are missing, but then forward stops.
static void encode_flush(Encoder *enc) {
    Buffer normal = {0};
    normalize(enc->tok, &normal, bytes_of(&enc->pending));
    if (normal.n + enc->out->n >= INT_MAX) die("text: too long, expected less than 2 GB");
    for (Bytes text = bytes_of(&normal); text.n && !interrupted;) {
        const size_t n = piece_length(enc->tok, text);
        merge_piece(enc->tok, (Bytes){text.p, n}, enc->out);
        text = bytes_from(text, n);
    }
    free(normal.p);
    enc->pending.n = 0;
}

// Adds plain text for encode_flush. Merges make no mark of it: so in a chat no user can type one.
static void encode_plain(Encoder *enc, Bytes text) { buffer_add(&enc->pending, text); }

// Adds a text. Each added token that it spells ends the plain text before it
// (encode_flush) and is appended; the rest goes to encode_plain. (Part II)
static void encode_marked(Encoder *enc, Bytes text);

// The same for a message. Which added tokens count, depends on who wrote it: (Part II)
//                         raw text  an answer  other messages
//   <|im_end|>            yes       no         no     a mark that output leaves out
//   Qwen3's <tool_call>   yes       yes        no     a mark that output shows
//   any other             yes       yes        yes    a word
static void encode_message(Encoder *enc, Bytes text, int role);

// Appends a raw text's ids, as HF's tokenizer(text). (In mode chat a prompt is a message.)
static void encode_raw(const Tokenizer *tok, Bytes text, Ids *out) {
    Encoder enc = {.tok = tok, .out = out};
    for (size_t i = 0; i < tok->prefix.n; i++) ids_add(out, tok->prefix.p[i]);
    encode_marked(&enc, text);
    encode_flush(&enc);
    for (size_t i = 0; i < tok->suffix.n; i++) ids_add(out, tok->suffix.p[i]);
    free(enc.pending.p);
}

// ------------------------------------------------------------------------------------------------
// The sampler: repetition penalty, presence penalty (which HF lacks), temperature, top-k, top-p, in
// HF's order. (The likeliest token each time would make a dull text.) Top-k and top-p cut off the
// many unlikely tokens: else one would come now and then. Of equal p the lower id is likelier.

typedef struct {
    float temperature;  // divides the logits: < 1 favours likely tokens; 0: always the likeliest
    float top_p;        // keep the smallest set that reaches this probability, the nucleus
    int top_k;          // keep the k most likely tokens, 0: all
    float presence;     // subtracted from the logits of tokens that are in the answer
    float repetition;   // > 1 makes tokens of the prompt and the answer less likely; 1: off
    bool *in_answer;    // (vocab_size) is in the answer
    bool *seen;         // (vocab_size) is in the prompt (Part II marks it) or in the answer
    uint64_t rng;       // the state of random_next; option -s sets it
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
    const float max = max_of(x, n);
    int best = 0;
    while (x[best] != max && best < n - 1) best++;
    return best;
}

// Replaces logits (n) by exp((logit - max) / temperature): probabilities divided by the largest
static void likelihoods(float *logits, int n, float max, float temperature) {
    for (int i = 0; i < n; i++) logits[i] = fast_exp((logits[i] - max) / temperature);
}

// Sets p[id] and the p of all less likely tokens to 0.
static void keep_likelier(float *p, int n, int id) {
    const float limit = p[id];
    for (int i = 0; i < id; i++) p[i] = p[i] >= limit ? p[i] : 0;
    for (int i = id; i < n; i++) p[i] = p[i] > limit ? p[i] : 0;
}

// Sets all p but the k largest to 0. A search finds the k-th largest between `least` (at least k
// values are >= it) and `above` (fewer than k are): each step tries a number between them, above /
// 256 while least is 0, because a p may be as small as 8e-39. It ends when k are left, or no float
// is between: then of equal ones those with the lower ids stay.
static void keep_top_k(float *p, int n, int k) {
    float least = 0, above = 2;
    int kept = n;  // how many values are >= least
    while (kept > k) {
        float middle = above / 256;
        if (middle <= least) middle = (least + above) / 2;
        if (middle == least || middle == above) break;  // no float is between them
        int count = 0;
        for (int i = 0; i < n; i++) count += p[i] >= middle;
        if (count < k) above = middle;
        else least = middle, kept = count;
    }
    for (int i = 0; i < n; i++) p[i] = p[i] >= least ? p[i] : 0;
    for (int i = n - 1; kept > k; i--)
        if (p[i] == least) p[i] = 0, kept--;
}

// Returns the lowest id at which the running sum of p (n) exceeds `point`, or n.
static int token_at(const float *p, int n, double point) {
    enum { STEP = 1024 };  // ids that sum_double adds at once: faster than one by one
    int i = 0;
    for (; i + STEP <= n; i += STEP) {
        const double sum = sum_double(p + i, STEP);
        if (point < sum) break;
        point -= sum;
    }
    for (; i < n && point >= p[i]; i++) point -= p[i];
    return i;
}

// The repetition penalty (HF RepetitionPenaltyLogitsProcessor), then the presence penalty
static void penalize(const Sampler *sampler, float *logits, int n) {
    const float repetition = sampler->repetition, presence = sampler->presence;
    for (int i = 0; repetition != 1 && i < n; i++) {
        float lower = logits[i] < 0 ? logits[i] * repetition : logits[i] / repetition;
        if (sampler->seen[i]) logits[i] = lower;
    }
    for (int i = 0; presence != 0 && i < n; i++) logits[i] -= sampler->in_answer[i] ? presence : 0;
}

// Draws the next token by its logits (n), may overwrite these, returns -1 if they are not finite.
// A token is in the nucleus if all likelier ones sum to less than top_p (> 0) of what top_k keeps:
// of p = 0.5, 0.3 and 0.2 with top_p = 0.6, the first two are. Sorting would find it, but is slow.
// Say that the first draw, from all, gives the third. The likelier ones sum to 0.8, so neither it
// nor a less likely token is in the nucleus: their p become 0. Draw again, until the drawn token is
// in it. Until then no token of the nucleus loses its p: so each is drawn in proportion to its p.
static int sample(Sampler *sampler, float *logits, int n) {
    penalize(sampler, logits, n);
    if (!isfinite(sum_double(logits, n))) return -1;
    if (sampler->temperature == 0) return argmax(logits, n);
    float *p = logits;
    likelihoods(p, n, max_of(logits, n), sampler->temperature);
    if (sampler->top_k > 0 && sampler->top_k < n) keep_top_k(p, n, sampler->top_k);
    double sum = sum_double(p, n), nucleus_sum = sampler->top_p * sum;
    for (;;) {
        int id = token_at(p, n, random_next(&sampler->rng) * sum);
        if (id == n) continue;  // a rounding error at the end of the sum
        keep_likelier(p, n, id);
        sum = sum_double(p, n);  // of the likelier ones
        if (sum < nucleus_sum) return id;
    }
}

// Returns log(sum(exp(logits))) of logits (n) and overwrites these. A logit minus this is log(p).
static double log_sum_exp(float *logits, int n) {
    const float max = max_of(logits, n);
    likelihoods(logits, n, max, 1);
    return log(sum_double(logits, n)) + max;
}

// ------------------------------------------------------------------------------------------------
// The main loop. A text is its ids; the first n_run have run, in order. An id's logits predict the
// next id. Ids 0 to target - 1 run as they are. Id number `target` is predicted: drawn, or if it is
// there, scored. (Option -o: Part II adds given answers, and each is scored.)
//
//   use             target begins at  each target ...                  the text ends
//   an answer       the prompt's end  is drawn, appended and written   by one of the Endings below
//   a perplexity    1                 is there: its -log(p) is added   COMPLETE: the last isn't run
//   an embedding    the text's end    is no id: x becomes the result   COMPLETE
//
// (A text longer than the context is scored in pieces, each from the last id of the one before.)
//
// For example, a prompt of the ids A B C gets two drawn ids, D and E, and then a stop id is drawn:
//
//   ids        n_run  target
//   A B C      0      3       A and B run: the ids after them are taken as they are
//   A B C      2      3       C runs, and D is drawn
//   A B C D    3      4       D runs, and E is drawn
//   A B C D E  4      5       E runs, and a stop id is drawn, but not appended: COMPLETE
// With option -n 2 it would end when E is drawn, and E would not run.

typedef enum {
    GOES_ON,
    COMPLETE,                      // a stop id, -x TEXT, -g's end; without an answer the last id
    IN_THINKING,                   // a stop id before the thinking has ended (Part II)
    LIMIT_REACHED, CONTEXT_ENDED,  // option -n; option -c
    REPEATS,                       // without -n: the answer goes round in circles
    INTERRUPTED,                   // any text: Ctrl-C
    FAILED                         // an error: results not finite, or -g's form too large
} Ending;

typedef struct Text {  // add_text makes it of a prompt, next_piece goes on with it (Part II)
    Ids ids;           // its tokens, those of the prompt first; a perplexity has at least two
    size_t n_run;      // how many have run: the KV cache, and the state of delta layers, have them
    size_t target;     // the number of the id that is predicted next: drawn or scored
    size_t n_prompt;   // ids before the answer, or before given answers (-o); in a perplexity all
    size_t max_ids;    // the most ids of prompt and answer (option -n)
    size_t context;    // the most positions (-c); while -o thinks, fewer: its answers need room
    bool embeds;       // no id is predicted: x becomes an embedding
    bool asks;         // no id is drawn: given answers are scored (option -o)
    double nll;        // the sum of -log(p) of its n scored ids: its perplexity is exp(nll / n)
    Ending ending;
    Sampler sampler;
    struct Writer *writer; // where the answer goes (Part II)
    struct Slot *slot;     // what else Part II keeps of it
} Text;

static bool is_stop(const Tokenizer *tok, int id) {
    for (size_t i = 0; i < tok->stop.n; i++)
        if (tok->stop.p[i] == id) return true;
    return false;
}

// Part II. writer_token writes a token's text. (It may end inside a character: then those bytes
// wait.) It returns false if option -x TEXT ends the answer: nothing from TEXT on is written.
static bool writer_token(struct Writer *out, const Tokenizer *tok, int id);

// Returns true if an answer goes round in circles. (Part II)
static bool watch_repeats(const Tokenizer *tok, Text *text);

// Appends an id to its text and writes it, unless it is a stop id. Returns the text's Ending.
static Ending append_id(const Tokenizer *tok, Text *text, int id) {
    Ids *ids = &text->ids;
    if (is_stop(tok, id)) return COMPLETE;
    ids_add(ids, id);
    text->target = ids->n;
    text->sampler.in_answer[id] = text->sampler.seen[id] = true;
    if (!writer_token(text->writer, tok, id)) return COMPLETE;
    if (ids->n == text->max_ids) return LIMIT_REACHED;
    if (watch_repeats(tok, text)) return REPEATS;
    return ids->n <= text->context ? GOES_ON : CONTEXT_ENDED;  // GOES_ON: there is room to run it
}

// With -g, a regular expression for the answer, returns a bit for each id, 1 if it may come next;
// without -g, or while the text thinks, NULL. (Part II)
static const uint32_t *allowed_ids(const Text *text);

// Calls append_id for a drawn id: without -g, -o and thinking that is all. Thinking of N ids (-r
// N), or that first goes round in circles, gets a sentence that ends it and </think>. (Part II)
static Ending accept_id(const Tokenizer *tok, Text *text, int id);

// Scores the first id of each given answer by the logits of the id before. (Part II)
static Ending score_first_ids(const Tokenizer *tok, Text *text, float *logits);

// Draws an id by the logits of the id before, and may overwrite these. Returns as append_id.
static Ending draw_next(const Tokenizer *tok, Text *text, float *logits) {
    if (text->asks) return score_first_ids(tok, text, logits);
    if (text->ids.n == text->max_ids) return LIMIT_REACHED;  // -n 0
    const uint32_t *allowed = allowed_ids(text);
    for (int i = 0; allowed && i < tok->vocab_size; i++)  // those not allowed fall below all others
        logits[i] -= (~allowed[i / 32] >> i % 32 & 1) * 1e25f;
    const int id = sample(&text->sampler, logits, tok->vocab_size);
    return id < 0 ? FAILED : accept_id(tok, text, id);
}

// Returns logits[id]; for id -1, which stands for any stop id (-o), log(sum(exp(their logits))).
static double logit_of(const Tokenizer *tok, const float *logits, int id);

// Returns -log(probability) of an id by the logits of the id before it, and overwrites these.
static double nll_of(const Tokenizer *tok, float *logits, int id) {
    const double logit = logit_of(tok, logits, id);
    return log_sum_exp(logits, tok->vocab_size) - logit;
}

// Adds the target's -log(probability). Returns FAILED, COMPLETE after the last id, or GOES_ON.
static Ending add_nll(Text *text, double nll) {
    text->nll += nll;
    text->target++;
    if (!isfinite(text->nll)) return FAILED;
    return text->target < text->ids.n ? GOES_ON : COMPLETE;
}

static void add_to_vector(Text *text, double number);  // appends it to the result (Part II)

// A text's embedding is y / |y|, where y = rmsnorm(x, rms_final) of its last id. So the dot product
// of two is the cosine of their angle: near 1 if the texts are alike to a model that was trained
// for this. Returns COMPLETE, or FAILED if it is not finite.
static Ending embed_text(const Model *m, Text *text, float *x) {
    const int dim = m->config.dim;
    double squares = 0;
    rmsnorm(x, x, m->weights.rms_final, dim, m->config.rms_norm_eps);
    for (int i = 0; i < dim; i++) squares += (double)x[i] * x[i];
    const double length = fmax(sqrt(squares), 1e-12);
    for (int i = 0; i < dim; i++) add_to_vector(text, x[i] / length);
    return isfinite(squares) ? COMPLETE : FAILED;
}

// The id before number `target` has run: does what the text is for. Returns its Ending.
static Ending use_output(Model *m, const Tokenizer *tok, Text *text) {
    if (text->embeds) return embed_text(m, text, m->state.x);
    if (text->target == text->ids.n) return draw_next(tok, text, compute_logits(m));
    return add_nll(text, nll_of(tok, compute_logits(m), text->ids.p[text->target]));
}

// Runs a text to its end, one token at a time.
static void run_text(Model *m, const Tokenizer *tok, Text *text) {
    while (text->ending == GOES_ON) {
        if (!forward(m, text->ids.p[text->n_run], (int)text->n_run)) text->ending = INTERRUPTED;
        else if (++text->n_run >= text->target)  // else the next id is taken as it is
            text->ending = use_output(m, tok, text);
    }
}

// ------------------------------------------------------------------------------------------------
// The chat format. (Raw text needs none of it.) A conversation is a list of messages. A chat model
// was trained on conversations written in one form. Its checkpoint has this form as a program, the
// chat template. So each turn's prompt is the whole conversation in that form, up to the answer:
//   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n
//   <|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n
// (one string; \n is a newline). The model goes on from there: if it thinks, with <think> (or the
// prompt ends with it), what it considers and </think>, then with the answer and <|im_end|>.
//
// export.py has turned the template into a ChatFormat. Each turn encodes the conversation anew,
// from its text: so it has the ids that this text had in training, although the model may have
// drawn others. If a <think> block, even an empty one, came before an earlier answer, most formats
// (not Qwen3.8's) leave it out, as training did: it would only fill the context.

typedef struct {
    int role;     // SYSTEM (instructions for all of it), USER or ASSISTANT (the model)
    Buffer text;  // of an answer that was drawn: its thinking, too
} Message;

typedef struct { Message *p; size_t n, cap; } Conversation;

// Returns what the prompt gets of message i: of an earlier answer what follows its thinking; in
// some formats without the blanks at its ends (Python's str.strip()). (Part II)
static Bytes content_of(const Tokenizer *tok, const Conversation *conversation, size_t i);

// Adds what stands before the content of message i. (Part II)
static void encode_open(Encoder *enc, const Conversation *conversation, size_t i, bool think);

// Adds the beginning of the answer that the model is to go on with. (Part II)
static void encode_begun(Encoder *enc, Bytes text);

// Makes the ids of a conversation, up to where the model begins its answer or, if the last message
// is the assistant's, goes on with it. Messages before number `first` are left out, except a system
// message: so a conversation too long for the context (option -c) forgets its first turns.
static void render(const Tokenizer *tok, const Conversation *conversation, size_t first, bool think,
                   Ids *out) {
    const ChatFormat *f = &tok->chat;
    const size_t n = conversation->n;
    const bool begun = n > 0 && conversation->p[n - 1].role == ASSISTANT;
    Encoder enc = {.tok = tok, .out = out};
    out->n = 0;
    encode_marked(&enc, f->start);
    if (n == 0 || conversation->p[0].role != SYSTEM) encode_marked(&enc, f->no_system[think]);
    for (size_t i = 0; i < n - begun; i++) {
        const int role = conversation->p[i].role;
        if (i < first && role != SYSTEM) continue;
        encode_open(&enc, conversation, i, think);
        encode_message(&enc, content_of(tok, conversation, i), role);
        encode_marked(&enc, f->close[role]);
    }
    if (begun) encode_begun(&enc, content_of(tok, conversation, n - 1));
    else encode_marked(&enc, f->answer_open[think]);
    encode_flush(&enc);
    free(enc.pending.p);
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
// At -O3, GCC would spend a third of its time on Part II, which no user would see run faster.
#if defined(__OPTIMIZE__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O1", "fp-contract=off")
#endif
#ifdef __APPLE__
#include <sys/sysctl.h>
enum { TERMINAL_LINE = 1023 };  // the most bytes of a line that is typed
#else
enum { TERMINAL_LINE = 4095 };
#endif

// Part II is best read from run_mode, near its end. What Part III provides to it:
static void start_platform(int *argc, char ***argv);  // signals; Windows: UTF-8 and bytes
static void start_threads(int count);
static int cpu_count(void);                           // how many threads to start without -j
static const char *version(void);                     // a line, with the instruction set in use
static double now(void);                              // seconds since some fixed point
static bool is_terminal(int fd);
static unsigned file_mode(const char *path);          // st_mode, or 0 if there is no such file
static Bytes file_map(const char *path);              // the whole file, mapped read-only
static void write_stdout(Bytes text);                 // all of it, whatever signals come
enum { LONGEST_PATH = 4000, LONGEST_NAME = LONGEST_PATH + 96 };  // of options; of new files
static const char *stdout_name = "stdout";            // for messages
static int file_open(const char *path, bool append);  // to read (-: stdin) or append; -1: an error
static bool file_lock(int fd);                        // false: another descriptor holds a lock
static double file_size(int fd);                      // of a regular file, else 0
static bool same_file(int a, int b);                  // both are one regular file
static double memory_size(void);                      // that this process may use, in bytes
static void use_huge_pages(void *p, size_t size);     // of HUGE_PAGE bytes, where there are such
static ssize_t read_more(int fd, Buffer *b);          // as read(), but waits if fd is nonblocking
static bool input_ready(int fd);                      // there is something to read, or the end
static bool stdin_has_data(void);                     // a pipe with data, or a file at its start
typedef enum { NOTHING, PART, LINE } Waiting;
static Waiting input_waits(void);                     // how much of a paste is still to be read

static void state_init(Model *m);                     // allocates State, for its context
static double position_size(const Config *c);         // bytes of all keys and values of a position

#ifndef PLAIN          // and for many tokens at once:
typedef struct {       // a token of a text, in a pass
    int token;         // its id
    int pos;           // its position in the text
    const int *blocks; // the text's blocks of the cache: position pos is in blocks[pos / block_len]
                       // (its address tells attend_all which rows are the same text's)
    float *state;      // (state_size) the text's: position 0 begins with zeros. The row changes it
    float *saved;      // where it is copied after the row, or NULL
    bool needed;       // x is needed after the last layer: for logits or an embedding
    const Text *text;
} Row;

// A pass runs rows, a token each: consecutive tokens of a text, then those of the next text.
typedef struct Pass {
    const Model *m;
    int batch;         // the most rows (option -b)
    int logit_rows;    // the most rows that get logits
    int n_blocks;      // of the KV cache
    int block_len;     // positions of a block: it has their keys and values in all layers
    int draft_rows;    // rows of a tile: together faster than one by one
    float *cache;      // (n_blocks) see The KV cache, Part III
    Row *rows;         // (batch)
    float *cos, *sin;  // (batch, rotary_dim / 2)  as in State, for each row
    float *x;          // (batch, dim)
    float *logits;     // (logit_rows, vocab_size)
    struct Worker *workers; // (threads) Part III only, like n
    int n;             // rows that run
    int n_needed;      // so many of them have been moved to the front, once all layers have run
    _Atomic int n_chosen;  // Part III only: experts that some token chose (see Threads)
} Pass;

// Allocates memory for passes of up to `batch` tokens, logit_rows rows of logits, and a cache of
// `texts` texts of Model.context positions. If memory is short it holds fewer texts, one at least.
static Pass *pass_init(const Model *m, int batch, int logit_rows, int texts);

// forward() for Pass.rows 0 .. n - 1, n <= batch: the same bits. The cache must hold the positions
// before them. In the end the needed rows move to the front, for classify. False: Ctrl-C came.
static bool forward_rows(Pass *p, int n);

// compute_logits() for rows 0 .. n - 1, n <= logit_rows. Returns Pass.logits.
static float *classify(Pass *p, int n);

// The threads run job(arg), and on_all_threads returns when the last has. They meet its loops EACH
// and SLICES in one order: each item of 0 .. count - 1 has one of them, and none goes on before all
// are done. A slice begins at a multiple of `chunk`. Loops do not nest. No break or return leaves
// one; between two a job may return. While no job runs, a loop of the main thread runs all items.
typedef void (*Job)(void *arg);
static void on_all_threads(Job job, void *arg);
typedef struct { int begin, end; } Slice;  // items begin .. end - 1
static bool next_slice(Slice *s, int count, int chunk);
#define SLICES(s, count, chunk) for (Slice s = {0}; next_slice(&s, count, chunk);)
#define EACH(i, count, chunk) SLICES(s, count, chunk) for (int i = s.begin; i < s.end; i++)
static void cache_copy(const Pass *p, int to, int from);  // a block: all keys and values
static size_t block_size(const Config *c);                // floats of a block of the cache

static uint64_t hash_of(uint64_t seed, const void *bytes, size_t n);  // finds damage, no forgery
// Reads at `at`, or writes where the last write ended. Returns false if it fails, or the file ends.
static bool file_move(int fd, void *p, size_t n, uint64_t at, bool writes);

// file_create makes a new file beside `path`, and its name. file_replace closes it. If it is whole,
// it replaces `path`. Else, or if it can't (errno), it is removed, and the result is false.
static int file_create(const char *path, char name[LONGEST_NAME]);
static bool file_replace(const char *path, const char *name, int fd, bool whole);
static void real_name(const char *path, char name[LONGEST_NAME]);  // of what a link names; or path
#endif

// Ctrl-C: its handler sets `interrupted`. run_dialogue clears it, once the turn is over, save_kept
// at the end. Encoding, loops over layers, and waits end early if it is set. So who called one
// looks at it first: ids of a text that was being encoded, x, logits and a line that was being read
// are not used then, and no error is made of them. What an answer has drawn stays.
//
// patience: -1: Ctrl-C ends the program. N: it does not, but another does after N seconds.
static volatile sig_atomic_t patience = -1;

// ------------------------------------------------------------------------------------------------
// Errors and memory

#ifndef __MINGW_PRINTF_FORMAT  // the dialect in which GCC checks formats
#define __MINGW_PRINTF_FORMAT printf
#endif

enum { EXIT_USAGE = 2, EXIT_INTERRUPT = 130, HUGE_PAGE = 1 << 21 };

static int quiet;  // 1, -q: on stderr only errors and warnings; 2, -qq: only errors
__attribute__((format(__MINGW_PRINTF_FORMAT, 1, 2))) static void report(const char *fmt, ...);
#define die_usage(...) (report(__VA_ARGS__), exit(EXIT_USAGE))  // an error in the command line
#define notice(...) (quiet > 0 ? (void)0 : report(__VA_ARGS__))  // worth knowing, but not an error
#define warn(...) (quiet > 1 ? (void)0 : report(__VA_ARGS__))    // it makes a result doubtful
#define warn_once(gave, ...) ((gave) ? (void)0 : ((gave) = true, warn(__VA_ARGS__)))

static atomic_flag dying = ATOMIC_FLAG_INIT;  // one thread reports, others wait until the end

static void die_memory(const char *what, double size) {
    while (atomic_flag_test_and_set(&dying)) {}
    die("memory: not enough for %s, expected %.0f MB", what, fmax(size / 1e6, 1));
}

// Returns `count` zeroed elements, aligned to 64 bytes, for good. Untouched pages take no memory.
// Huge pages mean fewer TLB misses in what is jumped through, as the cache and the tokens are.
static void *alloc(size_t count, size_t size, const char *what) {
    const size_t unit = count < HUGE_PAGE / size ? 64 : HUGE_PAGE;
    char *p = count < (SIZE_MAX - unit) / size ? calloc(count * size + unit, 1) : NULL;
    if (!p) die_memory(what, count * (double)size);
    p += -(uintptr_t)p & (unit - 1);
    if (unit == HUGE_PAGE) use_huge_pages(p, count * size);
    return p;
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

// Appends a text in printf's format, cut at 511 bytes, and a NUL, which does not count.
__attribute__((format(__MINGW_PRINTF_FORMAT, 2, 3)))
static void buffer_print(Buffer *b, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    buffer_add(b, (Bytes){(uint8_t *)text, strlen(text) + 1});
    b->n--;
}

// say returns a text in printf's format. It stays until the next say (progress in a pass has some),
// and may be an argument of that one: buffer_print makes a text before it adds it. An error that a
// function returns mostly is such a text: it is reported before anything else is said.
static Buffer phrase;
#define say(...) (phrase.n = 0, buffer_print(&phrase, __VA_ARGS__), (char *)phrase.p)

static void buffer_cut(Buffer *b, size_t n) {  // takes n bytes away at the start
    b->n -= n;
    if (b->n) memmove(b->p, b->p + n, b->n);
}

static Bytes bytes(const char *s) { return (Bytes){(const uint8_t *)s, strlen(s)}; }

static bool bytes_equal(Bytes a, Bytes b) {
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

static bool bytes_are(Bytes text, const char *word) { return bytes_equal(text, bytes(word)); }
INLINE int max_int(int a, int b) { return a > b ? a : b; }
INLINE size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
INLINE int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

typedef int32_t __attribute__((aligned(1), may_alias)) AnyInt;  // at any address: a float's bits
INLINE int32_t load_i32(const void *p) { return *(const AnyInt *)p; }

INLINE float as_float(uint32_t bits) { return (union { uint32_t i; float f; }){bits}.f; }

// Returns the offset after the last occurrence of `part`, or 0 if there is none, or it is empty.
static size_t find_last(Bytes text, Bytes part) {
    for (size_t end = text.n; part.n && end >= part.n; end--)
        if (memcmp(text.p + end - part.n, part.p, part.n) == 0) return end;
    return 0;
}

// ------------------------------------------------------------------------------------------------
// The model file, model.bin: a header of 256 bytes, then the weights, all little-endian. It is the
// format of the older qwen3.c (github.com/adriancable/qwen3.c), whose files still load: there the
// header is zero from 0x30 on, so zero stands for what that format always has.
//
//   0x00  u32 magic 0x616A6331, u32 version 1
//   0x08  what take_header takes: u32 or float, at 0x70 16 int8 levels; the last one is at 0x98
//   0x9C  u64 a hash of the weights, which export.py makes (-K tells models apart by it), or 0; all
//         other bytes must be zero
//
// take_weights has the weights in their order, each for all layers before the next. A Matrix is its
// bytes, then its scales. Both are in panels (see weight_int) if the header has panels = 1, else
// row by row. An embedding model has no classifier: its header says shared_classifier = 1.

typedef struct {  // takes a file apart from front to back, and never reads past its end
    const char *file;
    const char *part;  // what is being read, for messages
    Bytes rest;
    const char *hint;  // what to do if something is wrong
    bool or_zero;      // numbers may also be 0
    bool by_rows;      // matrices are, and become panels in memory
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
    if ((value >= low && value <= high) || (value == 0 && in->or_zero)) return value;
    const char *zero = in->or_zero && low > 0 ? "0 or " : "";
    const int digits = is_float ? 6 : 10;
    if (low == high)
        die_bad(in, name, "%s%g, found %.0f; export it again by this version's export.py", zero,
                low, value);
    die_bad(in, name, "%s%.*g to %.*g, found %.*g; %s", zero, digits, low, digits, high, digits,
            value, in->hint);
}

// Takes a number of this name into the struct that p points to.
#define TAKE(p, name, low, high) \
    p->name = take_number(in, #name, _Generic(p->name, float: true, default: false), low, high)

// Ends the program: `file` is no .bin file. The first n bytes of `source` name what to export.
static void die_export(const char *file, const char *what, int n, const char *source) {
    die("%s: %s, expected a .bin file, which this makes: export.py %.*s", file, what, n, source);
}

// Returns what may be wrong with the name of a file that can't be opened, for the end of a message.
static const char *name_hint(const char *path) {
    if (*path == '~' || strchr(path, '*')) return " (in quotes, ~ and * stay as they are)";
    if (file_mode(say("%s.bin", path))) return say(" (%s.bin is there)", path);
    return strchr(path, ' ') && !strstr(path, ".bin") ? " (is it a prompt? that goes with -i)" : "";
}

// Ends the program if MODEL is no file, or another one than was meant.
static void check_model(const char *path) {
    const char *slash = strchr(path, '/'), *last = strrchr(path, '/'), *end = strrchr(path, '.');
    const bool on_hub = (slash && slash == last && !strchr("./~", *path) &&
                         !strstr(path, ".bin")) || !strncmp(path, "https://", 8);
    const unsigned mode = file_mode(path);
    if (end > path && !strcmp(end, ".tokenizer"))
        die("%s: belongs to a model, expected %.*s", path, (int)(end - path), path);
    if (mode && end && !strcmp(end, ".safetensors"))
        die_export(path, "a part of a checkpoint", last > path ? (int)(last - path) : 1,
                   last ? path : ".");
    if (S_ISDIR(mode)) die_export(path, "a directory", INT_MAX, path);
    if (on_hub && !mode) die_export(path, "not a file", INT_MAX, path);  // ORGANIZATION/NAME
}

static void take_zeros(Cursor *in, int at, int end) {  // offsets in the header
    for (; at < end; at += 4) take_number(in, say("unknown field at 0x%02x", at), false, 0, 0);
}

static void take_header(Cursor *in, Config *c) {
    const uint32_t magic = take_u32(in);
    if (magic == 0x46554747) die_export(in->file, "a GGUF file", INT_MAX, in->file);
    if (magic != 0x616A6331)
        die("%s: not a qwen3.c model, expected a file made by export.py (magic 0x616a6331), "
            "found %s", in->file,
            (magic & 0xFFFF) == 0x8B1F ? "a gzip file: gzip -d makes it one"
            : magic == 0x73726576 ? "a Git LFS pointer: git lfs pull fetches the file"
            : (magic & 0xFF) == '<' ? "a web page: download it again" : say("0x%08x", magic));
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
    TAKE(c, rope_scaling, 2, 2);  // YaRN
    TAKE(c, rope_factor, 0, FLT_MAX);
    take_zeros(in, 0x40, 0x54);
    TAKE(c, qkv_bias, 0, 1);
    TAKE(c, no_qk_norm, 0, 1);
    TAKE(c, n_experts, 0, 4096);
    TAKE(c, n_experts_used, 0, 4096);
    TAKE(c, no_topk_norm, 0, 1);
    TAKE(c, layer_bits, 4, 4);
    TAKE(c, eight_bits, 0, 255);
    if (c->layer_bits) memcpy(c->levels, take(in, sizeof(c->levels)), sizeof(c->levels));
    else take_zeros(in, 0x70, 0x80);
    TAKE(c, panels, 1, 1);
    TAKE(c, attention_every, 2, 4096);
    TAKE(c, delta_k_heads, 1, 128);
    TAKE(c, delta_v_heads, 1, 256);
    TAKE(c, rotary_dim, 2, 4096);
    TAKE(c, gated_attention, 0, 1);
    TAKE(c, shared_expert, 0, 1);
    take(in, 8);  // the hash of the weights
    take_zeros(in, 0xA4, 0x100);
    if (c->rope_theta == 0) c->rope_theta = 1e6f;
    if (c->rms_norm_eps == 0) c->rms_norm_eps = 1e-6f;
    if (c->layer_bits == 0) c->layer_bits = 8;
    if (c->rotary_dim == 0) c->rotary_dim = c->head_dim;
    c->q_dim = c->n_heads * c->head_dim;
    c->kv_dim = c->n_kv_heads * c->head_dim;
    c->delta_k_dim = c->delta_k_heads * DELTA_DIM;
    c->delta_v_dim = c->delta_v_heads * DELTA_DIM;
    c->delta_dim = 2 * c->delta_k_dim + c->delta_v_dim;
    c->n_kv_layers = c->n_layers / max_int(c->attention_every, 1);
}

// Checks how the numbers fit together. A RULE ends the program if its condition is false.
static void check_config(const Cursor *in, const Config *c) {
    const int group = c->group_size, experts = c->n_experts, used = c->n_experts_used;
    const int every = c->attention_every, k_heads = c->delta_k_heads, v_heads = c->delta_v_heads;
    const int64_t most_cols = max_int(c->dim, c->hidden_dim);
#define RULE(name, good, expected) \
    if (!(good)) die_bad(in, #name, expected ", found %.10g", (double)c->name)
    RULE(group_size, (group & (group - 1)) == 0, "32, 64, 128 or 256");
    RULE(dim, c->dim % group == 0, "a multiple of group_size");
    RULE(hidden_dim, c->hidden_dim % group == 0, "a multiple of group_size");
    RULE(head_dim, c->head_dim % 2 == 0, "an even number");
    RULE(n_kv_heads, c->n_heads % c->n_kv_heads == 0, "a divisor of n_heads");
    RULE(q_dim, c->q_dim % group == 0, "n_heads * head_dim to be a multiple of group_size");
    RULE(rope_factor, (c->rope_factor == 0) == !c->rope_scaling, "> 0 with rope_scaling, else 0");
    RULE(n_experts_used, used <= experts && !used == !experts, "1 to n_experts, or 0 without");
    RULE(n_experts, all_experts(c) * most_cols <= 1 << 30, "at most 2^30 rows in all experts");
    RULE(no_topk_norm, !c->no_topk_norm || experts, "0 without experts");
    RULE(shared_expert, !c->shared_expert || experts, "0 without experts");
    RULE(rotary_dim, c->rotary_dim % 2 == 0 && c->rotary_dim <= c->head_dim,
         "an even number, at most head_dim");
    RULE(head_dim, c->head_dim % 16 == 0 || !c->gated_attention, "a multiple of 16 with a gate");
    RULE(n_layers, !every || c->n_layers % every == 0, "a multiple of attention_every");
    RULE(delta_k_heads, !k_heads == !every, "0 without attention_every, else 1 to 128");
    RULE(delta_v_heads, k_heads ? v_heads && v_heads % k_heads == 0 : !v_heads,
         "a multiple of delta_k_heads, or 0 without");
    RULE(delta_v_heads, c->delta_v_dim % group == 0, "it * 128 to be a multiple of group_size");
    RULE(qkv_bias, !c->qkv_bias || !every, "0 with delta layers");
    RULE(eight_bits, !c->eight_bits || c->layer_bits == 4, "0 without four bits");
    RULE(eight_bits, c->eight_bits < 128 || every || c->gated_attention, "0 to 127 without gates");
    for (int i = 1; i < 16 && c->layer_bits == 4; i++)
        RULE(levels[i], c->levels[i] > c->levels[i - 1], "ascending ones");
}

INLINE size_t scale_size(int bits) { return bits == 8 ? sizeof(float) : sizeof(uint16_t); }

static const float *take_floats(Cursor *in, uint64_t count, const char *what) {
    in->part = what;
    return count ? take(in, count * sizeof(float)) : NULL;
}

#define IN_PANELS "the weights in panels (export the model again: a new file needs none)"

// Takes a matrix's words, or its scales: n in a row, of `size` bytes.
INLINE const void *take_panels(Cursor *in, const Config *c, int rows, size_t n, const int size) {
    const int padded = round_up(rows, PANEL);
    const char *from = take(in, (c->panels ? padded : rows) * n * size);
    if (!in->by_rows) return from;
    char *panels = alloc(padded * n, size, IN_PANELS);
    for (int r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++, from += size)
            memcpy(panels + ((r / PANEL * n + i) * PANEL + r % PANEL) * size, from, size);
    return panels;
}

static Matrix take_matrix(Cursor *in, const Config *c, int rows, int cols, int bits,
                          const char *what) {
    const size_t words = (size_t)cols * bits / 32, groups = cols / c->group_size;
    in->part = what;
    const int8_t *bytes = take_panels(in, c, rows, words, 4);
    const void *scales = take_panels(in, c, rows, groups, scale_size(bits));
    return (Matrix){rows, cols, c->group_size, bits, bytes, scales, c->levels};
}

static void take_weights(Cursor *in, Config *c, Weights *w) {
    const int experts = max_int(all_experts(c), 1), every = max_int(c->attention_every, 1);
    const int norms = c->no_qk_norm ? 0 : c->head_dim, gates = c->gated_attention * c->q_dim;
#define EACH_LAYER for (int l = 0; l < c->n_layers; l++) w->layers[l]  // .x = take..., for each
#define BITS(matrix) (c->eight_bits >> (matrix) & 1 ? 8 : c->layer_bits)  // see eight_bits
#define KIND(attention, delta) ((l + 1) % every == 0 ? (attention) : (delta))
    EACH_LAYER.number = KIND(l / every, l - l / every);
    EACH_LAYER.rms_att = take_floats(in, c->dim, "rms_att");
    EACH_LAYER.rms_ffn = take_floats(in, c->dim, "rms_ffn");
    w->rms_final = take_floats(in, c->dim, "rms_final");
    EACH_LAYER.q_norm = take_floats(in, KIND(norms, 0), "q_norm");
    EACH_LAYER.k_norm = take_floats(in, KIND(norms, 0), "k_norm");
    EACH_LAYER.router = take_floats(in, (uint64_t)all_experts(c) * c->dim, "router");
    c->rope_freq = take_floats(in, c->rope_scaling ? c->rotary_dim / 2 : 0, "rope_freq");
    EACH_LAYER.conv = take_floats(in, KIND(0, (PAST + 1) * c->delta_dim), "conv");
    EACH_LAYER.forget = take_floats(in, KIND(0, c->delta_v_heads), "forget");
    EACH_LAYER.dt_bias = take_floats(in, KIND(0, c->delta_v_heads), "dt_bias");
    EACH_LAYER.o_norm = take_floats(in, KIND(0, DELTA_DIM), "o_norm");
    EACH_LAYER.wa = take_floats(in, KIND(0, (uint64_t)c->delta_v_heads * c->dim), "wa");
    EACH_LAYER.wb = take_floats(in, KIND(0, (uint64_t)c->delta_v_heads * c->dim), "wb");
    w->embedding = take_matrix(in, c, c->vocab_size, c->dim, 8, "the token embedding");
    EACH_LAYER.wq = take_matrix(in, c, KIND(c->q_dim, c->delta_k_dim), c->dim, BITS(0), "wq");
    EACH_LAYER.wk = take_matrix(in, c, KIND(c->kv_dim, c->delta_k_dim), c->dim, BITS(1), "wk");
    EACH_LAYER.wv = take_matrix(in, c, KIND(c->kv_dim, c->delta_v_dim), c->dim, BITS(2), "wv");
    EACH_LAYER.wg = take_matrix(in, c, KIND(gates, c->delta_v_dim), c->dim, BITS(7), "wg");
    EACH_LAYER.wo = take_matrix(in, c, c->dim, KIND(c->q_dim, c->delta_v_dim), BITS(3), "wo");
    EACH_LAYER.w1 = take_matrix(in, c, experts * c->hidden_dim, c->dim, BITS(4), "w1");
    EACH_LAYER.w2 = take_matrix(in, c, experts * c->dim, c->hidden_dim, BITS(5), "w2");
    EACH_LAYER.w3 = take_matrix(in, c, experts * c->hidden_dim, c->dim, BITS(6), "w3");
    w->classifier = c->shared_classifier ? w->embedding
        : take_matrix(in, c, c->vocab_size, c->dim, 8, "the classifier");
    EACH_LAYER.bq = take_floats(in, c->qkv_bias ? c->q_dim : 0, "bq");
    EACH_LAYER.bk = take_floats(in, c->qkv_bias ? c->kv_dim : 0, "bk");
    EACH_LAYER.bv = take_floats(in, c->qkv_bias ? c->kv_dim : 0, "bv");
}

// Maps the file. The weights stay there, but an older file's matrices are copied if the model runs.
// Only routers are checked: all take a minute, and most other bad weights make logits not finite.
static Bytes model_map(Model *m, const char *path, bool runs) {
    Config *c = &m->config;
    const Bytes file = file_map(path);
    const double start = now();
    Cursor in = {path, "the header", file, .hint = "copy or export it again"};
    take_header(&in, c);
    check_config(&in, c);
    in.by_rows = runs && !c->panels;
    if (in.by_rows && file.n > memory_size()) die_memory(IN_PANELS, file.n);
    m->weights.layers = alloc(c->n_layers, sizeof(Layer), "the layers");
    take_weights(&in, c, &m->weights);
    if (in.rest.n != 0)
        die("%s: wrong size, expected %zu bytes, found %zu", path, file.n - in.rest.n, file.n);
    for (int l = 0; l < c->n_layers && c->n_experts; l++)
        if (!isfinite(sum_double(m->weights.layers[l].router, all_experts(c) * c->dim)))
            die("%s: bad router of layer %d, expected finite numbers, found others", path, l);
    if (in.by_rows)
        notice("%s: an older file, put into panels (%.1f s, %.0f MB); export it again to save both",
               path, now() - start, file.n / 1e6);
    return file;
}

// ------------------------------------------------------------------------------------------------
// The tokenizer file, model.bin.tokenizer: u32 max_token_length (not used: some files count
// characters, not bytes), u32 bos id (used without <|endoftext|>), u32 eos id; then for each id
//
//   f32 score     higher scores merge first; -1e6 or less: never comes out of a merge
//   u32 length
//   u8 * length   the token's bytes
//
// A file of the older qwen3.c ends here, perhaps before vocab_size: the other tokens have no text.
// After exactly vocab_size tokens, export.py appends an extension: "q3tx", u32 version 1, u32
// length of the rest, then sections (see take_section), each at most once: a tag of 4 bytes, u32
// length, payload. The Unicode data is that of HF's tokenizers package, so that ids agree.

// What a file may ask for, so that none takes all time or memory
enum { LONGEST = 1024, LONGEST_ADDED = 128,  // bytes of a token, of an added token
       MOST_STRIP = 64, MOST_IDS = 1000,  // bytes of Tables.strip; ids in a section
       MOST_PARTS = 4 };                     // characters that one decomposes into

// Tables of characters: BAD_BYTE + byte stands for a byte that is not UTF-8.
enum { LAST_CHAR = 0x10FFFF, BAD_BYTE, N_CHARS = BAD_BYTE + 256, CHAR_MASK = (1 << 21) - 1 };
// Bits of Tables.chars: the class; from NFC_SHIFT on 1 if NFC may change the character or compose
// it with the one before; from CCC_SHIFT on its combining class (ccc)
enum { CLASS_MASK = 3, NFC_SHIFT = 2, CCC_SHIFT = 8 };

// Bits of Tokenizer.kind. SPECIAL: not written. NORMALIZED: looked for after NFC. What spells a
// token becomes it: in raw text if it is ADDED; in an answer if it is ANSWERED (ADDED, but not
// SPECIAL); in other messages if it is A_WORD, too (export.py: no mark of the chat format).
enum { ADDED = 1, SPECIAL = 2, NORMALIZED = 4, A_WORD = 8, ANSWERED = 16 };

typedef enum { CHAT, GENERATE, TOKENIZE, PERPLEXITY, EMBED, N_MODES } Mode;  // as in section mode

typedef struct { uint64_t *p; size_t n, cap; } Keys;  // as Buffer: rows, or a text's characters

// How tokens are found, characters, NFC, how the model is meant to be used, and more of its chats
typedef struct Tables {
    uint32_t *table[2];    // (mask + 1) hash tables: id + 1, or 0 if free; [1]: of added tokens
    uint32_t mask;         // slots - 1; slots: a power of 2, at least 256 and twice the tokens
    uint64_t secret;       // of the hash, odd: nobody can make a file whose tokens share slots
    size_t longest;        // the most bytes of a token
    bool has_normalized;   // some added tokens are NORMALIZED
    bool added_start[256]; // the bytes that added tokens begin with
    bool added_length[LONGEST_ADDED + 1];  // the numbers of bytes that they have
    bool has_classes;      // from the file; older ones: ASCII's are known, all others are letters
    bool lacks_nfc;        // an older file has deco, not nfcq, nfcd, nfcc: texts stay as they are
    bool guessed_chat;     // the chat template is more than fixed strings: it is taken for ChatML
    uint16_t chars[N_CHARS];  // what each character is
    Keys parts;            // nfcd: a character, n = 0 to 3, part n of its canonical decomposition.
                           // Not of Hangul syllables, which would only compose again
    Keys pairs;            // nfcc: two characters, and the one that NFC makes of them
    Mode mode;             // what the model is made for
    Bytes from;            // what it was exported from, and how
    Sampler advice;        // temperature, top_p, top_k and penalties that its makers advise
    Sampler plain_advice;  // these, except repetition, for a chat whose thinking is off
    // Of a chat, beside ChatFormat:
    Bytes begun;           // before an answer that the user begins (before one with a <think>
                           // block: open[ASSISTANT]); p NULL: answer_open[0]
    Bytes strip;           // </think>: all up to the last one is cut from an earlier answer,
    Bytes trim;            // and then any of these characters from the start of what is left
    Bytes system_to_think; // in place of open[SYSTEM] where thinking is on, if not NULL (Qwen3.8)
    bool keeps;            // what is cut is put into the <think> block of open[ASSISTANT] (Qwen3.8)
    bool strips;           // first of all, each message loses the blanks at its ends (Qwen3.5)
    bool systems;          // later system messages have the form of the first
    Bytes join;            // what stands between the text parts of a message's content
    bool no_systems;       // the chat template has no form for a system message
} Tables;

static const float ADDED_SCORE = -1e6f;  // tokens that come out of merges have a higher score

static Bytes take_bytes(Cursor *in, size_t n) { return (Bytes){take(in, n), n}; }
static Bytes take_text(Cursor *in) { return take_bytes(in, take_u32(in)); }

static uint32_t take_int(Cursor *in, uint32_t low, uint32_t high) {
    return (uint32_t)take_number(in, in->part, false, low, high);
}

static void take_ids(Cursor *in, const Tokenizer *tok, Ids *ids) {
    if (in->rest.n > 4 * MOST_IDS)
        die_bad(in, in->part, "at most %d ids, found %zu", MOST_IDS, in->rest.n / 4);
    while (in->rest.n) ids_add(ids, take_int(in, 0, tok->vocab_size - 1));
}

// adde: u32 id, u32 1 if it is SPECIAL + 2 if it is NORMALIZED + 4 if it is A_WORD (a SPECIAL one
// never counts as such), for each added token, by id. An empty section leaves take_tokens' guess.
static void take_added(Cursor *in, Tokenizer *tok) {
    if (in->rest.n) memset(tok->kind, 0, tok->vocab_size);
    for (uint32_t id, next = 0; in->rest.n; next = id + 1) {
        id = take_int(in, next, tok->vocab_size - 1);
        if (tok->text[id].n == 0 || tok->text[id].n > LONGEST_ADDED)
            die_bad(in, in->part, "tokens of 1 to %d bytes, found %zu in token %u", LONGEST_ADDED,
                    tok->text[id].n, id);
        tok->kind[id] = ADDED | take_int(in, 0, 7) << 1;
        tok->tables->has_normalized |= tok->kind[id] & NORMALIZED;
    }
}

// Takes ranges of characters, ascending: u32 first, u32 last, u32 value, 1 .. highest
static void take_ranges(Cursor *in, uint16_t *chars, uint32_t highest, int shift) {
    for (uint32_t next = 0; in->rest.n;) {
        const uint32_t first = take_int(in, next, LAST_CHAR);
        const uint32_t last = take_int(in, first, LAST_CHAR), value = take_int(in, 1, highest);
        for (next = first; next <= last; next++) chars[next] |= value << shift;
    }
}

// Takes rows: u64 keys of three characters of 21 bits, ascending even without the last one.
static void take_rows(Cursor *in, Keys *rows) {
    rows->p = alloc(in->rest.n / sizeof(*rows->p), sizeof(*rows->p), "the tokenizer");
    for (uint64_t row, before = 0; in->rest.n; before = row) {
        memcpy(&row, take(in, sizeof(row)), sizeof(row));
        const uint64_t a = row >> 42, b = row >> 21 & CHAR_MASK, c = row & CHAR_MASK;
        const bool ascends = rows->n == 0 || row >> 21 > before >> 21;
        if (a > LAST_CHAR || b > LAST_CHAR || c > LAST_CHAR || !ascends)
            die_bad(in, in->part, "ascending rows of characters, found another row %zu", rows->n);
        rows->p[rows->n++] = row;
    }
}

// Takes the texts that export.py finds by rendering the chat template.
static void take_chat(Cursor *in, ChatFormat *f, Tables *tables) {
    Bytes *texts[] = {&f->start, &f->no_system[0], &f->open[SYSTEM], &f->close[SYSTEM],
                      &f->open[USER], &f->close[USER], &f->open[ASSISTANT], &f->close[ASSISTANT],
                      &f->answer_open[0], &f->answer_open[1], &tables->strip, &tables->trim};
    for (size_t i = 0; i < sizeof(texts) / sizeof(*texts); i++) *texts[i] = take_text(in);
    if (tables->strip.n > MOST_STRIP)
        die_bad(in, in->part, "strip of at most %d bytes, found %zu", MOST_STRIP, tables->strip.n);
}

// samp, and plai for a chat whose thinking is switched off: f32, f32, u32, perhaps f32
static void take_sampling(Cursor *in, Sampler *advice) {
    TAKE(advice, temperature, 0, 1e6f);
    TAKE(advice, top_p, 1e-45f, 1);
    TAKE(advice, top_k, 0, INT_MAX);
    if (in->rest.n) TAKE(advice, presence, 0, 2);
}

// Takes the section whose tag is in->part. Returns false if there is no such section.
static bool take_section(Cursor *in, Tokenizer *tok) {
    Tables *tables = tok->tables;
    Sampler *advice = &tables->advice;
    const char *tag = in->part;
    if (!strcmp(tag, "adde")) take_added(in, tok);
    else if (!strcmp(tag, "clas")) take_ranges(in, tables->chars, SPACE, 0);
    else if (!strcmp(tag, "ccc ")) take_ranges(in, tables->chars, 255, CCC_SHIFT);
    else if (!strcmp(tag, "nfcq")) take_ranges(in, tables->chars, 1, NFC_SHIFT);
    else if (!strcmp(tag, "nfcd")) take_rows(in, &tables->parts);
    else if (!strcmp(tag, "nfcc")) take_rows(in, &tables->pairs);
    else if (!strcmp(tag, "deco")) tables->lacks_nfc = take_bytes(in, in->rest.n).n > 0;
    else if (!strcmp(tag, "head")) take_ids(in, tok, &tok->prefix);
    else if (!strcmp(tag, "tail")) take_ids(in, tok, &tok->suffix);
    else if (!strcmp(tag, "stop")) take_ids(in, tok, &tok->stop);
    else if (!strcmp(tag, "chat")) take_chat(in, &tok->chat, tables);
    else if (!strcmp(tag, "thin"))
        tok->chat.no_system[1] = take_text(in), tables->system_to_think = take_text(in);
    else if (!strcmp(tag, "keep")) tables->keeps = true;
    else if (!strcmp(tag, "begn")) tables->begun = take_bytes(in, in->rest.n);
    else if (!strcmp(tag, "strp")) tables->strips = true;
    else if (!strcmp(tag, "syst")) tables->systems = true;
    else if (!strcmp(tag, "join")) tables->join = take_bytes(in, min_size(in->rest.n, MOST_STRIP));
    else if (!strcmp(tag, "nosy")) tables->no_systems = true;
    else if (!strcmp(tag, "gues")) tables->guessed_chat = true;
    else if (!strcmp(tag, "from")) tables->from = take_bytes(in, in->rest.n);
    else if (!strcmp(tag, "mode")) TAKE(tables, mode, 0, N_MODES - 1);
    else if (!strcmp(tag, "repe")) TAKE(advice, repetition, 1e-6f, 1e12f);
    else if (!strcmp(tag, "samp")) take_sampling(in, advice);
    else if (!strcmp(tag, "plai")) take_sampling(in, &tables->plain_advice);
    else return false;
    return true;
}

static void take_extension(Cursor *in, Tokenizer *tok) {
    char tags[32][5] = {""};  // so far: these are enough, because each known section comes once
    in->part = "the extension";
    in->hint = "copy or export it again";
    if (memcmp(take(in, 4), "q3tx", 4) != 0)
        die("%s: wrong bytes after token %d, expected q3tx or the end; is it another model's?",
            in->file, tok->vocab_size - 1);
    take_number(in, "version", false, 1, 1);
    const uint32_t size = take_u32(in);
    if (size != in->rest.n) die_bad(in, "length", "%zu, found %u; %s", in->rest.n, size, in->hint);
    for (int n = 0; in->rest.n; n++) {
        const char *tag = memcpy(tags[n], take(in, 4), 4);
        Cursor section = {in->file, tag, .rest = take_text(in), .hint = in->hint};
        for (int i = 0; i < n; i++)
            if (!strcmp(tags[i], tag)) die("%s: section %s is there twice", in->file, tag);
        if (!take_section(&section, tok))
            die("%s: unknown section \"%s\"; was it made by a newer export.py?", in->file, tag);
        if (section.rest.n)
            die("%s: section %s has %zu bytes too many", in->file, tag, section.rest.n);
    }
}

// Returns the slot of the token with these bytes in one of the two tables, or the free slot for it.
static uint32_t *token_slot(const Tokenizer *tok, Bytes text, bool added) {
    const Tables *tables = tok->tables;
    uint32_t *table = tables->table[added];
    uint64_t hash = tables->secret ^ text.n;
    for (size_t i = 0; i < text.n; i++) {
        const __uint128_t product = (__uint128_t)(hash ^ text.p[i]) * tables->secret;
        hash = (uint64_t)(product ^ product >> 64);  // its two halves, xored
    }
    uint32_t slot = hash & tables->mask;
    while (table[slot] && !bytes_equal(tok->text[table[slot] - 1], text))
        slot = (slot + 1) & tables->mask;
    return &table[slot];
}

static int token_find(const Tokenizer *tok, Bytes text, bool added) {
    return (int)*token_slot(tok, text, added) - 1;
}

// Returns the first added token at or after *at, the longest if several begin there, and sets *at
// to its offset. If there is none, returns -1 and sets *at to the end of the text. Only tokens with
// all bits of `which` count, NORMALIZED ones only if it has this bit.
static int added_next(const Tokenizer *tok, Bytes text, size_t *at, int which) {
    for (; *at < text.n && !interrupted; ++*at) {
        if (!tok->tables->added_start[text.p[*at]]) continue;
        for (size_t n = min_size(LONGEST_ADDED, text.n - *at); n > 0; n--) {
            if (!tok->tables->added_length[n]) continue;
            const int id = token_find(tok, (Bytes){text.p + *at, n}, true);
            if (id >= 0 && (tok->kind[id] & (which | NORMALIZED)) == which) return id;
        }
    }
    return -1;
}

// Cuts the text at added tokens that are spelled out in it, and at NORMALIZED ones between them.
static void encode_cut(Encoder *enc, Bytes text, int which) {
    Buffer normal = {0};
    if (which & NORMALIZED) {
        normalize(enc->tok, &normal, text);
        text = bytes_of(&normal);
    }
    for (size_t at = 0, done = 0;;) {
        const int id = added_next(enc->tok, text, &at, which);
        Bytes between = {text.n ? text.p + done : text.p, at - done};
        if (enc->tok->tables->has_normalized && !(which & NORMALIZED))
            encode_cut(enc, between, which | NORMALIZED);
        else encode_plain(enc, between);
        if (id < 0) break;
        encode_flush(enc);
        ids_add(enc->out, id);
        done = at += enc->tok->text[id].n;
    }
    free(normal.p);
}

static void encode_marked(Encoder *enc, Bytes text) { encode_cut(enc, text, ADDED); }

static void encode_message(Encoder *enc, Bytes text, int role) {
    encode_cut(enc, text, role == ASSISTANT ? ANSWERED : ANSWERED | A_WORD);
}

// Appends the ids of a text. If `marked`, all added tokens are found, else those of a user's text.
static void encode_part(const Tokenizer *tok, Bytes text, bool marked, Ids *out) {
    Encoder enc = {.tok = tok, .out = out};
    if (marked) encode_marked(&enc, text);
    else encode_message(&enc, text, USER);
    encode_flush(&enc);
    free(enc.pending.p);
}

static void index_tokens(Tokenizer *tok, const char *file) {
    Tables *tables = tok->tables;
    tables->secret = (uint64_t)(now() * 1e9) * 0x9E3779B97F4A7C15u | 1;  // new in each run
    tables->mask = UINT32_MAX >> __builtin_clz(2 * (uint32_t)tok->vocab_size | 255);
    for (int i = 0; i < 2; i++)
        tables->table[i] = alloc((size_t)tables->mask + 1, sizeof(uint32_t), "the tokenizer");
    for (int id = 0; id < tok->vocab_size; id++) {
        const Bytes s = tok->text[id];
        const bool added = tok->kind[id] & ADDED;
        const bool merged = tok->priority[id] > ADDED_SCORE || (s.n == 1 && !added);
        if (s.n == 0) continue;
        if (added && !(tok->kind[id] & SPECIAL)) tok->kind[id] |= ANSWERED;
        for (int i = !merged; i <= added; i++) {  // table 0 if merges make it, 1 if it is added
            uint32_t *slot = token_slot(tok, s, i);
            if (*slot == 0) *slot = id + 1;
        }
        if (added) tables->added_start[s.p[0]] = tables->added_length[s.n] = true;
    }
    for (int i = 0; i < 256; i++)
        if (token_find(tok, (Bytes){(uint8_t[]){i}, 1}, false) < 0)
            die("%s: no token for byte 0x%02x, expected all 256; is it another model's?", file, i);
}

// Sets ChatML, which all Qwen models speak: for files without a chat format.
static void set_chatml(Tokenizer *tok, bool has_think) {
    Bytes end = bytes("<|im_end|>\n"), answer = bytes("<|im_start|>assistant\n");
    Bytes no_think = bytes("<|im_start|>assistant\n<think>\n\n</think>\n\n");
    tok->tables->strip = bytes("</think>");
    tok->tables->trim = bytes("\n");
    tok->chat = (ChatFormat){
        .open = {bytes("<|im_start|>system\n"), bytes("<|im_start|>user\n"), answer},
        .close = {end, end, end}, .answer_open = {has_think ? no_think : answer, answer}};
}

// Takes the tokens. Which of them are added is a guess: take_added may know it.
static void take_tokens(Cursor *in, Tokenizer *tok) {
    in->part = "the tokens";
    for (int id = 0; id < tok->vocab_size && in->rest.n; id++) {
        const float priority = tok->priority[id] = as_float(take_u32(in));
        if (isnan(priority)) die("%s: bad score of token %d, expected a number", in->file, id);
        const Bytes s = tok->text[id] = take_text(in);
        if (s.n > LONGEST)
            die("%s: bad length of token %d, expected at most %d bytes, found %zu; %s", in->file,
                id, LONGEST, s.n, in->hint);
        if (s.n > tok->tables->longest) tok->tables->longest = s.n;
        if (priority > ADDED_SCORE || s.n < 2 || s.n > LONGEST_ADDED) continue;
        const bool special = s.n > 4 && !memcmp(s.p, "<|", 2) && !memcmp(s.p + s.n - 2, "|>", 2);
        tok->kind[id] = special ? ADDED | SPECIAL : ADDED;
    }
}

static void tokenizer_load(Tokenizer *tok, const char *file, int vocab_size) {
    Cursor in = {file, "the header", file_map(file), .hint = "another model's, cut, or JSON?"};
    Tables *tables = alloc(1, sizeof(Tables), "the tokenizer");
    tables->join = bytes("\n");  // if the file does not say it
    tables->advice = (Sampler){.temperature = 0.6f, .top_p = 0.95f, .top_k = 20, .repetition = 1};
    tables->plain_advice = (Sampler){.temperature = 0.7f, .top_p = 0.8f, .top_k = 20};
    *tok = (Tokenizer){.vocab_size = vocab_size, .tables = tables,
                       .text = alloc(vocab_size, sizeof(Bytes), "the tokenizer"),
                       .priority = alloc(vocab_size, sizeof(float), "the tokenizer"),
                       .kind = alloc(vocab_size, 1, "the tokenizer")};
    take_u32(&in);  // max_token_length
    const int bos = take_number(&in, "bos id", false, 0, vocab_size - 1);
    const int eos = take_number(&in, "eos id", false, 0, vocab_size - 1);
    take_tokens(&in, tok);
    if (in.rest.n) take_extension(&in, tok);
    if (!tok->chat.no_system[1].p) tok->chat.no_system[1] = tok->chat.no_system[0];
    tables->has_classes = tables->chars['a'] & CLASS_MASK;  // else they are guessed here
    for (uint32_t c = 0; c < BAD_BYTE && !tables->has_classes; c++)
        tables->chars[c] |= c >= 128 || isalpha(c) ? LETTER : isspace(c) ? SPACE
                          : isdigit(c) ? NUMBER : OTHER;
    index_tokens(tok, file);
    tok->think = token_find(tok, bytes("<think>"), true);
    tok->end_think = token_find(tok, bytes("</think>"), true);
    tok->end_of_text = token_find(tok, bytes("<|endoftext|>"), true);
    if (tok->end_of_text < 0) tok->end_of_text = bos;
    if (!tok->chat.start.p) set_chatml(tok, tok->think >= 0);  // the file has no section chat
    int usual[] = {eos, tok->end_of_text, token_find(tok, bytes("<|im_end|>"), true)};
    const Ids stop = tok->stop.n ? tok->stop : (Ids){usual, 3, 3};
    tok->stop.n = 0;  // each once, because given answers add up the probabilities of all
    for (size_t i = 0; i < stop.n; i++)
        if (stop.p[i] >= 0 && !is_stop(tok, stop.p[i])) ids_add(&tok->stop, stop.p[i]);
}

// ------------------------------------------------------------------------------------------------
// Unicode: UTF-8, normalization form C (NFC; Unicode Standard Annex 15); merging a piece's tokens

// The code point at offset `at` and its n bytes (RFC 3629: neither overlong forms nor surrogates)
INLINE Char code_point_at(Bytes text, size_t at) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};  // of characters of n bytes
    const uint8_t *p = text.p + at;
    const int n = p[0] < 0xC0 ? 1 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    uint32_t c = n == 1 ? p[0] : p[0] & (0xFF >> n);
    int i = 1;
    while (i < n && at + i < text.n && (p[i] & 0xC0) == 0x80) c = c << 6 | (p[i++] & 0x3F);
    const bool stray = i < n || (n == 1 && c >= 0x80);
    const bool bad = stray || c < least[n] || c >= BAD_BYTE || (c >= 0xD800 && c < 0xE000);
    return bad ? (Char){.c = BAD_BYTE + p[0], .n = 1} : (Char){.c = c, .n = n};
}

// Returns whether these 1 to 3 bytes begin a character of more bytes.
static bool begins_char(Bytes text) {
    const uint8_t rest = *text.p & 15 ? 0x80 : 0xBF;  // for bytes that lack; E0 80, F0 80: overlong
    uint8_t u[4] = {rest, rest, rest, rest};
    memcpy(u, text.p, text.n);
    return code_point_at((Bytes){u, 4}, 0).n > (int)text.n;
}

// As code_point_at, but bad bytes that begin a character are one: a maximal subpart (Unicode 3.9,
// table 3-8). One U+FFFD stands for it, as in Python's and HF's decoding.
static Char decode_at(Bytes text, size_t at) {
    Char c = code_point_at(text, at);
    while (c.c >= BAD_BYTE && c.n < 3 && at + c.n < text.n
           && begins_char((Bytes){text.p + at, c.n + 1})) c.n++;
    return c;
}

// Returns the offset of the first byte that is not UTF-8, or is NUL; text.n if there is none.
static size_t find_bad_byte(Bytes text) {
    size_t at = 0;
    for (Char c; at < text.n && (c = code_point_at(text, at)).c < BAD_BYTE && c.c;) at += c.n;
    return at;
}

INLINE Char char_at(const Tokenizer *tok, Bytes text, size_t at) {
    if (at >= text.n) return (Char){0, 0, END};
    const Char c = code_point_at(text, at);
    return (Char){c.c, c.n, tok->tables->chars[c.c] & CLASS_MASK};
}

// Appends c as UTF-8; a BAD_BYTE as its byte.
static void add_char(Buffer *b, uint32_t c) {
    int n = c < 0x80 || c >= BAD_BYTE ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    uint8_t u[4] = {c >= BAD_BYTE ? c - BAD_BYTE : c};
    for (int i = n - 1; i > 0; i--, c >>= 6) u[i] = 0x80 | (c & 0x3F);
    if (n > 1) u[0] = 0xF0 << (4 - n) | c;
    buffer_add(b, (Bytes){u, n});
}

// Compares two keys without their last 21 bits, for qsort and bsearch.
static int compare_keys(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a >> 21, y = *(const uint64_t *)b >> 21;
    return (x > y) - (x < y);
}

// Returns the row that begins with these two numbers, or NULL.
static const uint64_t *find_row(const Keys *rows, uint64_t first, uint64_t second) {
    const uint64_t key = first << 42 | second << 21;
    return rows->n ? bsearch(&key, rows->p, rows->n, sizeof(key), compare_keys) : NULL;
}

// Adds a character's parts, or itself, to a text's: combining class (ccc), place and code point.
static void decompose(const Tokenizer *tok, Keys *keys, uint64_t c) {
    for (int n = 0; n < MOST_PARTS; n++) {
        const uint64_t *row = find_row(&tok->tables->parts, c, n);
        if (!row && n > 0) break;
        const uint64_t part = row ? *row & CHAR_MASK : c;
        const uint64_t ccc = tok->tables->chars[part] >> CCC_SHIFT;
        keys->p = grow(keys->p, &keys->cap, keys->n, 1, sizeof(uint64_t));
        keys->p[keys->n] = ccc << 56 | keys->n << 21 | part;
        keys->n++;
    }
}

// Sorts each run of marks (ccc > 0) by ccc, stably. Then each character composes with the last
// starter (ccc 0) before it, unless a character between the two has the same ccc or a higher one.
static void order_and_compose(const Tokenizer *tok, Keys *keys) {
    for (size_t i = 0, end; i < keys->n; i = end + 1) {
        for (end = i; end < keys->n && keys->p[end] >> 56; end++) {}
        qsort(keys->p + i, end - i, sizeof(uint64_t), compare_keys);
    }
    uint64_t *starter = NULL, *out = keys->p, last = 0;  // last: ccc of the one before; 0: starter
    for (size_t i = 0; i < keys->n; i++) {
        const uint64_t key = keys->p[i], ccc = key >> 56;
        const uint64_t *composed = !starter || (last && last >= ccc) ? NULL
            : find_row(&tok->tables->pairs, *starter & CHAR_MASK, key & CHAR_MASK);
        if (composed) *starter = *composed & CHAR_MASK;
        if (composed) continue;
        if (ccc == 0) starter = out;
        last = ccc;
        *out++ = key;
    }
    keys->n = out - keys->p;
}

// Returns whether NFC may change the character or compose it with the one before.
INLINE bool is_active(const Tokenizer *tok, Char c) { return tok->tables->chars[c.c] > CLASS_MASK; }

// Appends NFC(text). It copies what comes before the character that precedes the first active one.
static void normalize(const Tokenizer *tok, Buffer *out, Bytes text) {
    Keys keys = {0};
    Char c;
    size_t at = 0, copied = 0;
    for (; (c = char_at(tok, text, at)).n && !is_active(tok, c) && !interrupted; at += c.n)
        copied = at;
    buffer_add(out, (Bytes){text.p, copied});
    for (at = copied; (c = char_at(tok, text, at)).n && !interrupted; at += c.n)
        decompose(tok, &keys, c.c);
    order_and_compose(tok, &keys);
    for (size_t i = 0; i < keys.n; i++) add_char(out, keys.p[i] & CHAR_MASK);
    free(keys.p);
}

#ifdef PLAIN
static void merge_piece(const Tokenizer *tok, Bytes s, Ids *out) { encode_piece(tok, s, out); }
#else
// A token of a piece while it merges, known by where its bytes begin. The 2 n nodes of n bytes are
// a tree of what merges next. Leaf n + i has in its high bits the priority of symbol i with the
// next one, in its low bits n - i: so of equal ones the leftmost wins. It is 0 if the two make no
// token. Node i < n is the larger of nodes 2 i and 2 i + 1. So node 1 is the largest of all.
typedef struct Symbol {
    uint32_t prev;  // where the one before it begins
    uint32_t next;  // where the one after it begins; n: there is none, or it was merged away
    uint64_t node;  // of the tree: the elements from n on are only this
} Symbol;

// Updates the leaf of the symbol at `begin`: what it makes with the next one. Then the tree above.
static void update_symbol(const Tokenizer *tok, Symbol *s, Bytes piece, uint32_t begin) {
    const uint32_t n = (uint32_t)piece.n, next = s[begin].next, end = next < n ? s[next].next : n;
    const Bytes both = {piece.p + begin, end - begin};
    const int id = next < n ? token_find(tok, both, false) : -1;
    const float priority = id < 0 ? 0 : tok->priority[id] + 0.0f;  // + 0: never -0
    const uint32_t bits = (uint32_t)load_i32(&priority);
    const uint32_t order = bits ^ (bits >> 31 ? UINT32_MAX : 0x80000000);  // grows with it
    s[n + begin].node = id < 0 ? 0 : (uint64_t)order << 32 | (n - begin);
    for (uint32_t i = n + begin; i > 1; i /= 2)
        s[i / 2].node = s[i].node > s[i ^ 1].node ? s[i].node : s[i ^ 1].node;
}

static void merge_piece(const Tokenizer *tok, Bytes piece, Ids *out) {
    const uint32_t n = (uint32_t)piece.n;
    Symbol *s = grow(NULL, &(size_t){0}, 0, 2 * piece.n, sizeof(*s));
    for (uint32_t i = 0; i < 2 * n; i++) s[i] = (Symbol){i - 1, i + 1, 0};
    for (uint32_t i = 0; i < n && !interrupted; i++) update_symbol(tok, s, piece, i);
    while (s[1].node && !interrupted) {
        const uint32_t i = n - (uint32_t)s[1].node, merged = s[i].next, next = s[merged].next;
        s[i].next = next;
        s[merged].next = n;
        if (next < n) s[next].prev = i;
        if (i > 0) update_symbol(tok, s, piece, s[i].prev);
        update_symbol(tok, s, piece, i);
        update_symbol(tok, s, piece, merged);
    }
    for (uint32_t i = 0; i < n; i = s[i].next)
        ids_add(out, token_find(tok, (Bytes){piece.p + i, s[i].next - i}, false));
    free(s);
}
#endif

// Returns a text without the blanks at its end, U+3000 and the like, too. With both_ends, it loses
// them at both, and they are those of Python's str.strip(), which include U+1C to U+1F.
static Bytes strip(const Tokenizer *tok, Bytes text, bool both_ends) {
    size_t start = 0, end = 0;
    for (size_t at = 0; at < text.n;) {
        const Char c = char_at(tok, text, at);
        at += c.n;
        if (c.class != SPACE && !(both_ends && c.c >= 0x1C && c.c <= 0x1F)) end = at;
        else if (both_ends && end == 0) start = at;
    }
    return (Bytes){bytes_from(text, start).p, end ? end - start : 0};
}

static Bytes strip_end(const Tokenizer *tok, Bytes text) { return strip(tok, text, false); }

// ------------------------------------------------------------------------------------------------
// Forms (-g): an answer matches a regular expression, from its first byte to its last. This becomes
// steps (Thompson 1968), of three kinds:
//
//   CHARS   waits for a character of a set,     X|Y     FORK to Y, X, JUMP to the end, Y
//           and leads to the next step          X{1,2}  X, FORK to the end, X
//   FORK    leads to the next and another one   X*      FORK to the end, X, FORK to X
//   JUMP    leads to another one                Before each X is a FORK, mostly to X alone.
//
// The last step of all waits, too: there the answer may end. A text's state is which steps wait. A
// state has a mask, a bit for each id: 1 if the answer may go on with it. States and masks are made
// when a text first needs them (prepare_text), and serve all texts. No state is a dead end: from
// each step characters lead to the last one, and each of their bytes is a token.

typedef struct {
    enum { CHARS, FORK, JUMP } kind;
    int to;             // of FORK, JUMP: how many steps the other one is away
    int first, end;     // of CHARS: the set's ranges are number first .. end - 1
} Step;

typedef struct {
    size_t steps, n;    // the n steps that wait: in Form.waiting, in order
    int lacks;          // bytes that a begun character lacks. It is one of low .. high, for which
    int low, high;      // the steps wait. low > high: any may end it, and they are those after it
    uint16_t next[256]; // the state after each byte
    bool may_end;       // the last step of all is among them
    uint32_t *mask;     // (vocab_size) bits, or NULL: it is not made yet
} FormState;

// Numbers of states. LEFT: no answer begins so. At FORM_OPEN it may also begin with <think>.
enum { UNKNOWN, LEFT, FORM_START, FORM_OPEN, FIRST_OTHER };
enum { MOST_STEPS = 1 << 20, MOST_STATES = 1 << 16, MOST_SIZE = 1 << 28, MOST_WORK = 1 << 24 };

typedef struct Form {
    Step *steps;
    FormState *states;
    size_t n_steps, steps_cap, n_states, states_cap;
    Keys ranges;        // of characters: low << 21 | high
    uint16_t *table;    // (2 * MOST_STATES) a hash table of states' numbers (16 bits), or UNKNOWN
    Ids waiting;        // steps of all states
    Ids found, left;    // those of the state that is made, and those still to be looked at
    unsigned *seen, round;  // (n_steps) the round that found a step last
    struct Listed { int id; uint16_t n, common; } *tokens;  // that an answer may have, by bytes
    Buffer rests;       // of each its bytes after those that it has in common with the one before
    int n_tokens, work; // work: steps and ranges that were looked at for this mask, or id
    size_t size;        // of states and masks, in bytes
    bool full;          // a limit was reached: until all are forgotten, some are not whole
    bool takes_turns;   // the texts of a pass need more states than there may be: each draws alone
    const void *turn;   // the text that these states are of
} Form;

static int low_of(uint64_t range) { return (int)(range >> 21); }
static int high_of(uint64_t range) { return (int)(range & CHAR_MASK); }

// Finds the steps that wait, from those in `left` on.
static void find_steps(Form *f) {
    f->found.n = 0;
    f->round++;
    for (; f->left.n > 0; f->work++) {
        const int number = f->left.p[--f->left.n];
        const Step *step = &f->steps[number];
        if (f->seen[number] == f->round) continue;
        f->seen[number] = f->round;
        if (step->kind == CHARS) ids_add(&f->found, number);
        if (step->kind == FORK) ids_add(&f->left, number + 1);
        if (step->kind != CHARS) ids_add(&f->left, number + step->to);
    }
}

static int compare_ints(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

// Returns the state of the steps that were found.
static int take_found(Form *f, int lacks, int low, int high) {
    Ids *found = &f->found;
    const size_t n = found->n;
    uint64_t hash = (uint64_t)low << 32 | high << 2 | lacks;
    if (n == 0) return LEFT;
    qsort(found->p, n, sizeof(int), compare_ints);
    for (size_t i = 0; i < n; i++) hash = (hash ^ found->p[i]) * 0x9E3779B97F4A7C15u;
    size_t slot = (hash >> 32) % (2 * MOST_STATES);
    for (; f->table[slot]; slot = (slot + 1) % (2 * MOST_STATES)) {
        const FormState *s = &f->states[f->table[slot]];
        if (s->n == n && s->lacks == lacks && s->low == low && s->high == high &&
            memcmp(f->waiting.p + s->steps, found->p, n * sizeof(int)) == 0) return f->table[slot];
    }
    if (f->n_states == MOST_STATES || f->size > MOST_SIZE || f->work > MOST_WORK) {
        f->full = true;
        return LEFT;
    }
    f->states = grow(f->states, &f->states_cap, f->n_states, 2, sizeof(FormState));  // + FORM_OPEN
    f->states[f->n_states] = (FormState){f->waiting.n, n, lacks, low, high, {UNKNOWN},
                                         !lacks && found->p[n - 1] == (int)f->n_steps - 1, NULL};
    for (size_t i = 0; i < n; i++) ids_add(&f->waiting, found->p[i]);
    f->size += sizeof(FormState) + n * sizeof(int);
    return f->table[slot] = f->n_states++;
}

// Returns whether a step takes a character of low .. high. If it does not take all of them, *whole
// becomes false. *from .. *to, in which these are, shrinks to characters that it treats like these.
static bool takes_any(Form *f, Step step, int low, int high, int *from, int *to, bool *whole) {
    for (int i = step.first; i < step.end; i++, f->work++) {
        const int first = low_of(f->ranges.p[i]), last = high_of(f->ranges.p[i]);
        const bool before = last < low, after = first > high;
        if (!after) *from = max_int(*from, before ? last + 1 : first);
        if (!before) *to = min_int(*to, after ? first - 1 : last);
        if (before) continue;
        *whole &= after || (first <= low && last >= high);
        return !after;
    }
    return false;
}

// Returns the state after a byte. The bytes so far begin a unit of characters, low .. high. If each
// step takes all of these or none (whole), the steps go on now, and the bytes that lack may be any.
// Else the state keeps low .. high, and the next byte decides. from .. to are characters that all
// steps take like low .. high: each byte whose unit is among them leads to the same state.
static int next_state(Form *f, int state, uint8_t byte) {
    if (f->states[state].next[byte] != UNKNOWN) return f->states[state].next[byte];
    static const int least[] = {0, 0x80, 0x800, 0x10000, LAST_CHAR + 1};  // of 1 to 4 bytes
    const FormState s = f->states[state];
    const bool begun = s.lacks > 0, any = s.low > s.high;
    const int lacks = begun ? s.lacks - 1 : (byte >= 0x80) + (byte >= 0xE0) + (byte >= 0xF0);
    const int unit = 1 << 6 * lacks;  // so many characters begin with these bytes
    int from = any ? 0 : begun ? s.low : least[lacks];
    int to = any ? 64 * unit - 1 : begun ? s.high : least[lacks + 1] - 1;
    // The number of this byte's unit. (U+00E9 is C3 A9: A9 is unit 0xE9 of one character each.)
    const int at = begun ? to / unit / 64 * 64 + (byte & 63) : lacks ? byte & 63 >> lacks : byte;
    const int low = max_int(at * unit, from), high = min_int(at * unit + unit - 1, to);
    bool whole = high - low == unit - 1;
    if ((byte >> 6 == 2) != begun || byte >= 0xF8 || low > high)
        return f->states[state].next[byte] = LEFT;
    f->found.n = 0;
    for (size_t i = s.steps; i < s.steps + s.n; i++) {
        const int step = f->waiting.p[i];
        if (any || takes_any(f, f->steps[step], low, high, &from, &to, &whole))
            ids_add(&f->found, step);
    }
    for (size_t i = 0; i < f->found.n && whole; i++) ids_add(&f->left, f->found.p[i] + !any);
    if (whole) find_steps(f);
    const int made = !whole ? take_found(f, lacks, low, high) : take_found(f, lacks, lacks > 0, 0);
    uint16_t *next = f->states[state].next;
    next[byte] = made;
    for (int c = (from + unit - 1) / unit; whole && (c + 1) * unit - 1 <= to; c++)
        next[byte + c - at] = made;
    return made;
}

static int state_after(Form *f, int state, Bytes text) {
    for (size_t i = 0; i < text.n && state != LEFT; i++) state = next_state(f, state, text.p[i]);
    return state;
}

static void start_states(Form *f) {  // and forgets all others
    for (size_t i = FORM_START; i < f->n_states; i++) free(f->states[i].mask);
    memset(f->table, 0, 2 * MOST_STATES * sizeof(*f->table));
    f->n_states = FORM_START;
    f->waiting.n = f->size = f->work = 0;
    f->full = false;
    ids_add(&f->left, 0);
    find_steps(f);
    take_found(f, 0, 0, 0);
    f->states[FORM_OPEN] = f->states[FORM_START];
    f->n_states = FIRST_OTHER;
}

// Lists the tokens that an answer may have: those with a text that is written, but no stop ids,
// and in a chat not those that begin and end thinking. A key is a text's first 4 bytes, and the id.
// Keys are sorted by each of these bytes, the last one first (LSD radix sort).
static void list_tokens(Form *f, const Tokenizer *tok, bool chat) {
    uint64_t *keys = grow(NULL, &(size_t){0}, 0, tok->vocab_size, sizeof(*keys));
    uint64_t *sorted = grow(NULL, &(size_t){0}, 0, tok->vocab_size, sizeof(*keys));
    bool is_token[256] = {false};
    Bytes last = {0};
    for (int id = 0; id < tok->vocab_size; id++) {
        const Bytes text = tok->text[id];
        const bool marks = chat && (id == tok->think || id == tok->end_think);
        if (text.n == 0 || tok->kind[id] & SPECIAL || is_stop(tok, id) || marks) continue;
        is_token[*text.p] |= text.n == 1;
        keys[f->n_tokens] = id;
        for (size_t i = 0; i < min_size(text.n, 4); i++)
            keys[f->n_tokens] |= (uint64_t)text.p[i] << (56 - 8 * i);
        f->n_tokens++;
    }
    for (int i = 0; i < 256; i++)
        if (!is_token[i]) die("-g: byte 0x%02x is no token of this model that answers may have", i);
    for (int shift = 32; shift < 64; shift += 8) {
        int at[257] = {0};  // where the next key with each byte goes
        uint64_t *from = keys;
        for (int i = 0; i < f->n_tokens; i++) at[(from[i] >> shift & 255) + 1]++;
        for (int byte = 0; byte < 256; byte++) at[byte + 1] += at[byte];
        for (int i = 0; i < f->n_tokens; i++) sorted[at[from[i] >> shift & 255]++] = from[i];
        keys = sorted;
        sorted = from;
    }
    f->tokens = alloc(f->n_tokens, sizeof(*f->tokens), "-g");
    for (int i = 0; i < f->n_tokens; i++) {
        const int id = (int)(uint32_t)keys[i];
        const Bytes text = tok->text[id];
        size_t common = 0;
        while (common < min_size(text.n, last.n) && text.p[common] == last.p[common]) common++;
        f->tokens[i] = (struct Listed){id, text.n, common};
        buffer_add(&f->rests, bytes_from(text, common));
        last = text;
    }
    free(keys);
    free(sorted);
}

// Makes a state's mask: path[i] is the state after i bytes of a token.
static void make_mask(Form *f, const Tokenizer *tok, int state) {
    const size_t size = (tok->vocab_size / 32 + 1) * sizeof(uint32_t);
    const uint8_t *rest = f->rests.p;
    int path[LONGEST + 1] = {state}, known = 0;  // path[0 .. known] are those of the last token
    if (f->states[state].mask) return;
    uint32_t *mask = memset(grow(NULL, &(size_t){0}, 0, size, 1), 0, size);
    f->work = 0;
    for (const struct Listed *t = f->tokens; t < f->tokens + f->n_tokens; t++) {
        known = min_int(known, t->common);  // then known is t->common, or path[known] is LEFT
        for (; known < t->n && path[known] != LEFT; known++)
            path[known + 1] = next_state(f, path[known], rest[known - t->common]);
        if (path[known] != LEFT) mask[t->id / 32] |= 1u << t->id % 32;
        rest += t->n - t->common;
    }
    for (size_t i = 0; i < tok->stop.n && f->states[state].may_end; i++)
        mask[tok->stop.p[i] / 32] |= 1u << tok->stop.p[i] % 32;
    if (state == FORM_OPEN) mask[tok->think / 32] |= 1u << tok->think % 32;
    f->states[state].mask = mask;
    f->size += size;
}

typedef struct { Form *form; const char *start, *at; int depth; } Expression;  // from `at`: to read

static void form_need(const Expression *x, const char *at, bool good, const char *expected) {
    if (!good)
        die_usage("-g: bad expression at byte %d, expected %s, found %s%.16s",
                  (int)(at - x->start) + 1, expected, *at ? "" : "its end", at);
}

INLINE bool take_sign(Expression *x, char sign) { return *x->at == sign && x->at++; }

static int add_step(Form *f, Step step) {  // and returns its number
    if (f->n_steps == MOST_STEPS) die_usage("-g: too long, expected lower counts");
    f->steps = grow(f->steps, &f->steps_cap, f->n_steps, 1, sizeof(Step));
    f->steps[f->n_steps] = step;
    return (int)f->n_steps++;
}

static void add_range(Keys *set, uint64_t low, uint64_t high) {
    set->p = grow(set->p, &set->cap, set->n, 1, sizeof(uint64_t));
    set->p[set->n++] = low << 21 | high;
}

// Replaces a set by all other characters, in order. Halves of pairs (UTF-16) are none.
static void invert_set(Keys *set) {
    int next = 0;  // the character after the ranges so far
    size_t n = 0;
    add_range(set, 0xD800, 0xDFFF);
    qsort(set->p, set->n, sizeof(uint64_t), compare_keys);
    for (size_t i = 0; i < set->n; i++) {
        const int low = low_of(set->p[i]), high = high_of(set->p[i]);
        if (low > next) set->p[n++] = (uint64_t)next << 21 | (low - 1);
        next = max_int(next, high + 1);
    }
    set->n = n;
    if (next <= LAST_CHAR) add_range(set, next, LAST_CHAR);
}

// Adds ASCII's \d, \w or \s to a set; in capitals all other characters.
static void add_class(Keys *set, int letter) {
    const bool others = isupper(letter);
    const char *range = strchr("dD", letter) ? "09" : strchr("wW", letter) ? "09AZ__az" : "\t\r  ";
    int next = 0;
    for (; *range; next = range[1] + 1, range += 2)
        add_range(set, others ? next : range[0], others ? range[0] - 1 : range[1]);
    if (others) add_range(set, next, LAST_CHAR);
}

// Takes a character or an escape, and returns what it means; -1: a class, which goes to the set.
static int take_char(Expression *x, Keys *set) {
    static const char hex[] = "0123456789abcdefABCDEF";
    const char *start = x->at;
    const bool escape = take_sign(x, '\\');
    const Char next = code_point_at((Bytes){(const uint8_t *)x->at, 4}, 0);  // a NUL ends it
    const uint32_t c = next.c;
    form_need(x, x->at, c && c < BAD_BYTE, "a character");
    x->at += next.n;
    if (!escape) return (int)c;
    if (c == 'n' || c == 't' || c == 'r') return c == 'n' ? '\n' : c == 't' ? '\t' : '\r';
    if (c < 128 && strchr("dwsDWS", (int)c)) return add_class(set, (int)c), -1;
    form_need(x, start, c == 'x' || c == 'u' || c >= 128 || !isalnum((int)c),
              "\\d \\w \\s \\D \\W \\S \\n \\t \\r \\xHH \\uHHHH, or \\ and a sign");
    if (c != 'x' && c != 'u') return (int)c;
    const size_t digits = c == 'x' ? 2 : 4;
    unsigned code = 0xD800;
    if (strspn(x->at, hex) >= digits) sscanf(x->at, c == 'x' ? "%2x" : "%4x", &code);
    form_need(x, start, code < 0xD800 || code > 0xDFFF,
              "\\x and 2 hexadecimal digits, or \\u and 4: no half of a pair");
    x->at += digits;
    return (int)code;
}

// Adds a step for the characters of a set, or for all others.
static void add_chars(Expression *x, Keys *set, bool others) {
    Keys *all = &x->form->ranges;
    const int first = (int)all->n;
    if (!others) invert_set(set);
    invert_set(set);  // now in order: takes_any needs that
    form_need(x, x->at, set->n > 0, "a set before this that has characters");
    for (size_t i = 0; i < set->n; i++) add_range(all, low_of(set->p[i]), high_of(set->p[i]));
    add_step(x->form, (Step){CHARS, 0, first, (int)all->n});
    free(set->p);
}

static void add_set(Expression *x) {  // [...], whose [ is taken
    const bool others = take_sign(x, '^');
    Keys set = {0};
    form_need(x, x->at, strncmp(x->at, "[:", 2), "[A-Za-z]: there are no named classes");
    do {
        const char *start = x->at;
        form_need(x, start, *start, "] after a set");
        const int low = take_char(x, &set);
        const bool range = x->at[0] == '-' && x->at[1] != ']' && take_sign(x, '-');
        const int high = range ? take_char(x, &set) : low;
        form_need(x, start, !range || (low >= 0 && high >= low), "a range from low to high");
        if (low >= 0) add_range(&set, low, high);
    } while (!take_sign(x, ']'));
    add_chars(x, &set, others);
}

static void add_ways(Expression *x);

static void add_atom(Expression *x) {  // a character, a set or a group
    const char *start = x->at;
    Keys set = {0};
    if (take_sign(x, '[')) {
        add_set(x);
    } else if (take_sign(x, '(')) {
        form_need(x, start, !take_sign(x, '?') || take_sign(x, ':'),
                  "a group, ( or (?:, without flags or look-around");
        form_need(x, start, x->depth++ < 100, "at most 100 groups inside each other");
        add_ways(x);
        form_need(x, x->at, take_sign(x, ')'), ")");
        x->depth--;
    } else {
        form_need(x, start, !strchr("*+?{^$", *start), *start != '{' || !strchr(start, '"')
                  ? "\\ before this sign (.* is any text)"
                  : "an expression: export.py --form makes it of a schema");
        const bool any = take_sign(x, '.');  // all but \n
        const int c = any ? '\n' : take_char(x, &set);
        if (c >= 0) add_range(&set, c, c);
        add_chars(x, &set, any);
    }
}

// Takes how often something comes, *least to *most times; -1: without a limit.
static void take_count(Expression *x, int *least, int *most) {
    const char *start = x->at, sign = *x->at;
    if (!sign || !strchr("?*+{", sign)) return;
    x->at++;
    *least = sign == '+';
    *most = sign == '?' ? 1 : -1;
    if (sign == '{') {
        form_need(x, x->at, isdigit((uint8_t)*x->at), "a count: {2}, {2,} or {2,3}");
        *least = *most = (int)min_size(strtoul(x->at, (char **)&x->at, 10), MOST_STEPS);
        if (take_sign(x, ',') && *x->at == '}') *most = -1;
        else if (isdigit((uint8_t)*x->at))
            *most = (int)min_size(strtoul(x->at, (char **)&x->at, 10), MOST_STEPS);
        form_need(x, x->at, take_sign(x, '}'), "}");
        form_need(x, start, *most < 0 || *most >= *least, "a count from low to high");
    }
    form_need(x, x->at, !*x->at || !strchr("?*+{", *x->at), "no lazy, possessive or second repeat");
}

static void add_repeated(Expression *x) {
    Form *f = x->form;
    const int begin = add_step(f, (Step){FORK, 1, 0, 0});  // to the next step, until a count forks
    int least = 1, most = 1;
    add_atom(x);
    take_count(x, &least, &most);
    const int n = (int)f->n_steps - begin, copies = most < 0 ? max_int(least, 1) : most;
    for (int i = n; i < (int64_t)copies * n; i++) add_step(f, f->steps[begin + i % n]);
    for (int i = least; i < copies; i++) f->steps[begin + i * n].to = (copies - i) * n + (most < 0);
    if (most < 0) add_step(f, (Step){FORK, 1 - n, 0, 0});
    if (most == 0) f->n_steps = begin;
}

static void add_ways(Expression *x) {  // X|Y
    Form *f = x->form;
    int jump = -1;  // the last JUMP to the end. Its `to` is the number of the one before, or -1
    do {
        const int fork = add_step(f, (Step){FORK, 1, 0, 0});  // to the next step, until | forks
        while (*x->at && !strchr("|)$", *x->at)) add_repeated(x);
        if (*x->at == '|') jump = add_step(f, (Step){JUMP, jump, 0, 0});
        if (*x->at == '|') f->steps[fork].to = jump + 1 - fork;
    } while (take_sign(x, '|'));
    for (int before; jump >= 0; jump = before)
        before = f->steps[jump].to, f->steps[jump].to = (int)f->n_steps - jump;
}

// Makes the form of an expression. A ^ at its start and a $ at its end say what holds anyway.
static Form *make_form(const char *text) {
    Form *f = alloc(1, sizeof(Form), "-g");
    Expression x = {f, text, text, 0};
    take_sign(&x, '^');
    add_ways(&x);
    take_sign(&x, '$');
    form_need(&x, x.at, !*x.at, "its end (^ begins and $ ends the whole; \\^ \\$ are signs)");
    add_step(f, (Step){CHARS, 0, 0, 0});
    f->seen = alloc(f->n_steps, sizeof(*f->seen), "-g");
    f->table = alloc(2 * MOST_STATES, sizeof(*f->table), "-g");
    start_states(f);
    return f;
}

// ------------------------------------------------------------------------------------------------
// Modes: what the program makes of a text (with -o another thing), and options: the command line

enum { CHOICES = N_MODES, OWN_CHOICES };  // OWN_CHOICES: -o @NAME
#define REASON "error"                    // the member that says why a line has no result

static const struct {
    const char *name;        // for -m
    bool has_answers;        // tokens are drawn
    size_t least;            // the fewest tokens of a text
    const char *members[7];  // that add_result adds to a list's object, in this order, then NULL
    const char *idle;        // letters of options that have no effect: a notice
} modes[] = {
    [CHAT] = {"chat", true, 1, {"answer", "end", REASON}, ""},
    [GENERATE] = {"generate", true, 1, {"answer", "end", REASON}, "yr"},
    [TOKENIZE] = {"tokenize", false, 0, {"ids", REASON}, "yrtpkaexsnK"},
    [PERPLEXITY] = {"perplexity", false, 2, {"tokens", "nll", "ppl", REASON}, "yrtpkaexsnK"},
    [EMBED] = {"embed", false, 1, {"vector", REASON}, "yrtpkaexsn"},
    [CHOICES] = {NULL, true, 1, {"choice", "p", "mass", REASON}, NULL},
    [OWN_CHOICES] = {NULL, true, 1, {"choice", "p", "mass", "nll", "tokens", REASON}, NULL}};

typedef struct {  // of the command line. Not given: NULL, or -1 without a default
    const char *model, *text, *file, *list, *out, *system, *stop, *answers;  // list: of -l or -L
    const char *keep, *form;  // FILE of -K, EXPRESSION of -g
    const char *member;    // NAME, if `answers` is @NAME
    int mode, think, top_k, context, cache_bits, batch, threads;
    int n;                 // -1: no limit, -2: none, but repeats end an answer
    float temperature, top_p, presence, repetition;
    unsigned long long seed;
    int given[256];        // how often an option of this letter was given
} Options;

static const char usage[] =  // after the line of --version
    "Runs Qwen3 and Qwen3.5 models. MODEL is a .bin file made by export.py.\n"
    "usage: qwen3 MODEL [options]\n\n"
    "  -i TEXT    the prompt; without -i and -f a terminal chats; a pipe is a prompt\n"
    "  -f FILE    the prompt is FILE's text (- is stdin), after -i and an empty line\n"
    "  -l FILE    a list: each line of FILE (- is stdin) is a text, each answer a line\n"
    "  -L FILE    the same, where a line is JSON: a text, an array of messages, or an\n"
    "             object with \"text\" or \"messages\", which comes back with the answer\n"
    "  -w FILE    the list's answers go to FILE; after a cut the same command goes on\n"
    "  -m MODE    chat, generate (raw text), embed, tokenize, perplexity [the model's]\n"
    "  -y TEXT    system prompt (chat) [none]\n"
    "  -r 0|1|N   thinking off, on, or on for at most N tokens (chat) [0]\n"
    "  -o TEXT|TEXT...  how likely each of these answers is; the likeliest is written\n"
    "  -o @NAME   with -L: the same of the answers in each object's array NAME\n"
    "  -g EXPRESSION  a regular expression that each answer matches, all of it [none];\n"
    "             for JSON: -g \"$(export.py --form SCHEMA.json)\"\n"
    "  -t FLOAT   temperature, 0 is greedy [the checkpoint's; without thinking 0.7]\n"
    "  -p FLOAT   top-p, above 0 and up to 1 [the checkpoint's; without thinking 0.8]\n"
    "  -k INT     top-k, 0 is off [the checkpoint's; without thinking 20]\n"
    "  -a FLOAT   presence penalty on tokens already generated, 0 to 2 [the checkpoint's]\n"
    "  -e FLOAT   repetition penalty, 1 is off [the checkpoint's]\n"
    "  -x TEXT    end the answer before TEXT (chat, generate) [none]\n"
    "  -s INT     random seed, 64 bits [from the clock, below 1000000; with -w 0]\n"
    "  -n INT     most new tokens per answer, -1: no limit [until it repeats itself]\n"
    "  -c INT     context in tokens, 0 is the model's [what a quarter of the memory\n"
    "             holds, at least 4096, at most the model's; perplexity 4096]\n"
    "  -C 32|8    bits of a number in its cache; 8: less memory, long texts faster [32]\n"
    "  -K FILE    keep what ran in FILE, for later runs whose prompt begins alike\n"
    "  -b INT     prompt tokens per pass, 1 to 512; never changes the output [512]\n"
    "  -j INT     threads; never changes the output [all cores this process may use]\n"
    "  -q         on stderr only errors and what makes a result doubtful\n"
    "  -qq        on stderr only errors\n"
    "  -v         also settings and the prompt's ids; with -m tokenize, a line a token\n"
    "  -h, --version\n\n"
    "A prompt from both: ls -l | qwen3 model.bin -i \"Which file is the largest?\" -f -\n"
    "A loop over lines of a pipe needs </dev/null, or the unread ones are a notice.\n"
    "-m chat on a pipe: each line is a turn. The model's text goes to stdout, all else\n"
    "to stderr. Exit: 0 success, 1 file, memory, model, 2 usage error, 130 Ctrl-C.\n";

typedef struct {
    char letter;
    enum { TEXT, MODE, INTEGER, REAL, SEED } type;
    size_t place;           // in Options
    double low, high;       // limits of the value; of a TEXT or SEED, of its number of bytes
    const char *expected;   // what the value should be; NULL: a number from low to high
    const char *others;     // what other programs call it, each name between spaces
} Option;

#define PLACE(name) offsetof(Options, name)

static const Option options[] = {  // those with a value
    {'i', TEXT, PLACE(text), 0, INT_MAX, NULL, " prompt input "},
    {'f', TEXT, PLACE(file), 1, LONGEST_PATH, "a file's name, or -", " file prompt-file "},
    {'l', TEXT, PLACE(list), 1, LONGEST_PATH, "a file's name, or -", " list batch "},
    {'L', TEXT, PLACE(list), 1, LONGEST_PATH, "a file's name, or -", ""},
    {'w', TEXT, PLACE(out), 1, LONGEST_PATH, "a file's name", " output output-file "},
    {'m', MODE, PLACE(mode), 0, N_MODES - 1,
     "chat, generate, embed, tokenize or perplexity (MODEL goes without -m)", " mode "},
    {'y', TEXT, PLACE(system), 0, INT_MAX, NULL, " system system-prompt sys "},
    {'r', INTEGER, PLACE(think), 0, INT_MAX,
     "0 (off), 1 (on) or N (on, for at most N tokens)", " reasoning-budget thinking-budget "},
    {'o', TEXT, PLACE(answers), 0, INT_MAX, NULL, " choices "},
    {'g', TEXT, PLACE(form), 1, INT_MAX, "a regular expression", " regex guided-regex "},
    {'t', REAL, PLACE(temperature), 0, 1000, NULL, " temp temperature "},
    {'p', REAL, PLACE(top_p), 1e-30, 1, "above 0 and up to 1 (a prompt goes with -i)", " top-p "},
    {'k', INTEGER, PLACE(top_k), 0, INT_MAX, "0 (off) or more, a whole number", " top-k "},
    {'a', REAL, PLACE(presence), 0, 2, NULL, " presence-penalty "},
    {'e', REAL, PLACE(repetition), 0.01, 100, "0.01 to 100, where 1 is off",
     " repeat-penalty repetition-penalty "},
    {'x', TEXT, PLACE(stop), 1, INT_MAX, "a text, not empty", " stop reverse-prompt "},
    {'s', SEED, PLACE(seed), 0, INT_MAX, "a 64-bit integer", " seed "},
    {'n', INTEGER, PLACE(n), -1, INT_MAX, NULL,
     " n-predict predict num-predict max-tokens max-new-tokens max-completion-tokens "},
    {'c', INTEGER, PLACE(context), 0, INT_MAX, NULL,
     " ctx ctx-size num-ctx context max-model-len "},
    {'C', INTEGER, PLACE(cache_bits), 8, 32, "8 or 32",
     " cache-type-k cache-type-v ctk ctv kv-cache-dtype cache-bits kv-bits "},
    {'K', TEXT, PLACE(keep), 1, LONGEST_PATH, "a file's name",
     " prompt-cache prompt-cache-all slot-save-path "},
    {'b', INTEGER, PLACE(batch), 1, 512, NULL, " batch-size "},
    {'j', INTEGER, PLACE(threads), 1, 1024, NULL, " threads "},
};
enum { N_OPTIONS = sizeof(options) / sizeof(*options) };

static const struct { const char *others, *here; } hints[] = {
    {" model model-path ", "MODEL without an option"}, {" quiet silent ", "-q"},
    {" think thinking enable-thinking reasoning ", "-r 1, or -r N for at most N tokens"},
    {" no-think no-thinking nothink hidethinking ", "-r 0"}, {" verbose ", "-v"},
    {" json jsonl form grammar grammar-file json-schema json-schema-file format response-format ",
     "-g EXPRESSION (for JSON that of export.py --form SCHEMA.json), -L FILE (a list in JSON)"},
    {" chat-template chat-template-file ", "it in the model: export.py has --chat-template FILE"},
    {" chat conversation cnv interactive ", "nothing: without -i and -f it chats"},
    {" embedding embeddings ", "-m embed"}, {" stream ", "nothing: answers come as they are made"},
    {" ng ngl gpu gpu-layers n-gpu-layers device ", "nothing: all runs on the CPU"},
    {" port host server api ", "nothing: there is no server here"}, {" V ", "-v or --version"},
    {" image mmproj ", "nothing: there are no images here"},
    {"  ", "-f - (stdin)"},  // for - alone
    {" lora ", "nothing: a LoRA is merged into its model before the export"},
    {" hf hf-repo ", "a file: export.py ORGANIZATION/NAME makes it"}};

// Returns the option of this name. If there is none, ends the program and names the likely mistake:
// another program's name for it, up to =, whose _ count as -.
static const Option *option_named(const char *arg) {
    const char *const usual = "one that -h lists, each by itself", *start = arg + strspn(arg, "-");
    const char *right = usual;
    char name[64];
    snprintf(name, sizeof(name), " %.*s ", (int)strcspn(start, "="), start);
    for (char *c = name; *c; c++) *c = *c == '_' ? '-' : *c;
    for (size_t i = 0; i < sizeof(hints) / sizeof(*hints); i++)
        if (strstr(hints[i].others, name)) right = hints[i].here;
    for (const Option *option = options; option < options + N_OPTIONS; option++) {
        const bool begins = arg[1] == option->letter;
        if (begins && !arg[2]) return option;
        if (strstr(option->others, name) ||
            (tolower((uint8_t)arg[1]) == option->letter && !arg[2]))
            right = say("-%c; -h lists all", option->letter);
        else if (begins && right == usual &&
                 (strchr("0123456789.-=", arg[2]) || strpbrk(arg, "./")))
            right = say("a space: -%c %.80s", arg[1], arg + 2 + (arg[2] == '='));
    }
    die_usage("%.80s: unknown option, expected %s", arg, right);
}

// An argument that is no option, and stands after `before`, is MODEL. Else it ends the program.
static void set_model(Options *o, const char *arg, const char *before) {
    const char *odd = *arg == '\xE2' ? arg : *before == '\xE2' ? before : NULL;  // U+2000 to U+2FFF
    if (odd) die_usage("%.80s: begins with a typographic dash or quote, expected - or \"", odd);
    if (*before == '-' && before[1] >= 'A' && !before[2] && !o->given[(uint8_t)before[1]])
        die_usage("%s: was taken for the value of the option before it, is one missing?", before);
    if (o->model && !file_mode(o->model) && file_mode(say("%s %s", o->model, arg)))
        die_usage("\"%.99s %.99s\" is one name: expected quotes around it", o->model, arg);
    const char *const commands = " run serve list ls ps show pull chat help ";  // of others
    const bool command = o->model && strstr(commands, say(" %s ", o->model));
    if (o->model && (command || file_mode(arg)) && !file_mode(o->model))
        die_usage("%.80s: before \"%.99s\", expected MODEL first, no command; -i has the prompt",
                  o->model, arg);
    if (o->model && (before == o->text || before == o->system || before == o->form))
        die_usage("%.80s: unexpected, expected quotes around all of the text: \"%.80s %.80s ...\"",
                  arg, before, arg);
    if (o->model)
        die_usage("%.80s: unexpected, as MODEL is \"%.99s\"; a prompt goes with -i, in quotes: "
                  "-i \"%.80s\", a file (cat joins several) with -f, -l, -L", arg, o->model, arg);
    o->model = arg;
}

// Sets an option, or ends the program if it can't have this value, or has none.
static void set_option(Options *o, const Option *option, const char *value) {
    if (!value) die_usage("-%c: alone, expected a value after it", option->letter);
    if (strchr("lLwK", option->letter) && *value == '-' && value[1])
        die_usage("-%c: expected a value after it, found %.80s (or is it a file? ./%.80s)",
                  option->letter, value, value);
    void *place = (char *)o + option->place;
    char *end = NULL;
    double number = strlen(value);  // of a TEXT or SEED; of the others the value
    errno = 0;
    if (option->type == TEXT) *(const char **)place = value;
    else if (option->type == INTEGER) number = strtoll(value, &end, 10);
    else if (option->type == REAL) number = strtod(value, &end);
    else if (option->type == MODE)
        for (number = 0; number < N_MODES && strcmp(value, modes[(int)number].name);) number++;
    else if (*value == '-') o->seed = strtoll(value, &end, 10);
    else o->seed = strtoull(value, &end, 10);
    const bool in_range = number >= option->low && number <= option->high;
    if (!in_range || end == value || (end && *end) || (option->type == SEED && errno))
        die_usage("-%c: bad value, expected %s, found \"%.80s\"%s", option->letter,
                  option->expected ? option->expected
                                   : say("%.10g to %.10g%s", option->low, option->high,
                                         option->type == INTEGER ? ", a whole number" : ""), value,
                  option->type == REAL && strchr(value, ',') ? "; a point parts decimals" : "");
    if (option->type == REAL) *(float *)place = (float)number;
    if (option->type == MODE || option->type == INTEGER) *(int *)place = (int)number;
}

#define NO_TEXT "-m %s: no text, expected -i TEXT, -f FILE or a pipe"

// Finds the NAME of -o @NAME. Ends the program if -o can have no effect.
static void check_answers(Options *o) {
    const char *text = o->answers;
    o->member = *text == '@' && !strchr(text, '|') ? text + 1 : NULL;
    if (o->member && (!o->given['L'] || !*o->member))
        die_usage("-o %s: expected -L FILE, whose objects have this member", text);
    if (!o->text && !o->file && !o->list)
        die_usage("-o: a conversation, expected -i TEXT, -f FILE (- is stdin) or a list");
}

static Options parse_options(int argc, char **argv) {
    Options o = {.mode = -1, .think = -1, .temperature = -1, .top_p = -1, .top_k = -1, .n = -2,
                 .presence = -1, .repetition = -1, .context = -1, .cache_bits = 32, .batch = 512,
                 .threads = -1, .seed = (uint64_t)(now() * 1e6) % 1000000};
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        const bool help = !strcmp(arg, "-h") || !strcmp(arg, "--help") || !strcmp(arg, "-help");
        if (help || !strcmp(arg, "--version")) {
            write_stdout(bytes(version()));
            if (help) write_stdout(bytes(usage));
            exit(EXIT_SUCCESS);
        }
        const bool very_quiet = !strcmp(arg, "-qq"), one = *arg == '-' && arg[1] && !arg[2];
        if ((one || very_quiet) && o.given[(uint8_t)arg[1]]++)
            die_usage("%s: given twice, expected once", arg);
        if (very_quiet || !strcmp(arg, "-q")) quiet = 1 + very_quiet;
        else if (arg[0] != '-') set_model(&o, arg, argv[i - 1]);
        else if (strcmp(arg, "-v")) set_option(&o, option_named(arg), argv[++i]);  // NULL: the end
    }
    if (!o.model || !*o.model || strlen(o.model) > LONGEST_PATH)
        die_usage("MODEL: %s, expected a .bin file; -h shows more",
                  o.model && *o.model ? "too long" : "missing");
    for (const char *p = "qv lL lf Lf lv Lv ox og gx "; *p; p += 3)  // pairs of which one is left
        if (o.given[(uint8_t)p[0]] && o.given[(uint8_t)p[1]])
            die_usage("-%c, -%c: both given, expected one of them", p[0], p[1]);
    if (o.cache_bits != 8 && o.cache_bits != 32)
        die_usage("-C: bad value, expected 8 or 32, found \"%d\"", o.cache_bits);
    if (o.out && (!o.list || *o.out == '-'))
        die_usage("-w: expected a list (-l, -L) and a file's name; one answer goes to > FILE");
    if (o.keep && !strcmp(o.keep, "-")) die_usage("-K: expected a file's name, found -");
    const bool asks_stdin = !o.text && !o.file && !o.list && o.mode != CHAT;
    if (asks_stdin && !is_terminal(STDIN_FILENO)) o.file = "-";  // a pipe
    if (o.out && !o.given['s']) o.seed = 0;
    if ((o.answers || o.form) && o.mode >= 0 && !modes[o.mode].has_answers)
        die_usage("-%c: -m %s has no answers", o.form ? 'g' : 'o', modes[o.mode].name);
    if (o.answers) check_answers(&o);
    if (asks_stdin && !o.file && o.mode >= 0) die_usage(NO_TEXT, modes[o.mode].name);
    return o;
}

// ------------------------------------------------------------------------------------------------
// Texts and places. A text waits, runs and ends. Its place is free then, and its results stay there
// until the next text takes it. The order of places:
//
//   0            n_running         n_texts  most_texts
//   | run        | wait to run     | free   |
//   | first come ...     last come |        |

enum { MOST_TEXTS = 32, MOST_GUESSED = 6 };  // that run together; that have guesses in a pass
enum { KEPT_STEPS = 10, MOST_KEPTS = MOST_TEXTS + 4 + KEPT_STEPS };  // see count_kepts; -K's Head
enum { ANY_STOP = -1 };                // a given answer's last id: any stop id. It never runs.
enum { THINKS = -2, FIRST_IDS = -1 };  // Slot.choice: it thinks; then the TEXTs' first ids come
enum { BY_BUDGET = GOES_ON, NOT_CLOSED = FAILED + 1 };  // Slot.closed_by: -r N, or none

typedef struct Choice {  // a given answer
    Buffer text;
    size_t n_tokens;   // that it adds to the prompt
    Ids ids;           // first what stands at the prompt's last places (Choices.before) once this
                       // TEXT follows, then these tokens, then ANY_STOP if another begins with them
    bool same_ids, same_text;  // as another one of its row: only that one is summed
    size_t n_chosen;   // of a list's texts: those that most likely get it
} Choice;

typedef struct Choices {
    Choice *p;
    int n;
    size_t cap;
    size_t before;     // last ids of the prompt, of which a TEXT changes some: see encode_choices
} Choices;

typedef struct Blocks { int *p, n; } Blocks;  // of the cache: position pos is in p[pos / block_len]

static size_t state_size(const Config *c) {  // floats of the delta layers' state of a text
    return (c->n_layers - c->n_kv_layers) * layer_state(c);
}

typedef struct Kept {  // what is kept of a text: when it ends or can't begin yet, and on its way
    int *ids;          // (n) the first ones, that ran
    size_t n;          // 0: nothing is kept
    Blocks blocks;     // with their keys and values
    float *state;      // of the delta layers after the last of them: it can't be cut
    const Text *maker; // of a Kept that is being made: this pass saves the state of this text there
} Kept;

typedef struct Slot {  // what Part II has of a text, beside Text
    const struct Engine *engine;
    struct {           // memory of the place, which the next text there uses again
        Ids prompt;    // and room for context + 1 more ids: Text.ids, a part, may not need more
        Buffer out;    // the answer of a text in a list, or an embedding
        Choices choices;  // the given answers: with -o @NAME its own, else those of all texts
        double *nll;   // (choices.n) -log of their probabilities
        size_t nll_cap;
        Blocks blocks; // of a text that runs; one that waits has none
        float *state;  // (state_size) of delta layers, as of n_run
    } own;
    size_t number;     // of its line in a list, from 0
    double start;      // when it was added
    size_t cached;     // tokens of the prompt that did not need to run
    bool started;      // also if it had to stop, and waits again
    size_t drawn;      // tokens of its answer, of what closes its thinking, of given answers (-o)
    bool thinking;     // its ids end inside <think>
    int thought;       // tokens of thinking that were drawn
    size_t watched;    // repeats count from this id on: at first n_prompt; with -n never (INT_MAX)
    int repeats;       // how much it repeats itself: see watch_repeats
    int closed_by;     // the Ending that closed its thinking, BY_BUDGET (-r N), or NOT_CLOSED
    int form;          // with -g: the state after the answer's ids so far
    size_t form_start; // ids when the form began: from there on the state can be made again
    bool too_many;     // its form has too many states: it FAILED
    int choice;        // with -o: what it waits for, THINKS, FIRST_IDS, or a given answer's score
    int n_begun;       // given answers that were scored, or are
    struct Slot *asker;  // whose given answers it scores: its own, or another's (see add_helpers)
    // Many texts at once only:
    size_t parts_at;   // with states, Kepts are made after so many ids: where others part from it,
    size_t next_turn_at;  // and where its own next turn, or next given answer, does
    int rows;          // ids that run in this pass, without guesses
    int first;         // the first of its needed rows, once these have moved to the front
    int guesses;       // so many ids after the text were guessed for this pass
    int right;         // of these, so many have been drawn
} Slot;

typedef struct Engine {  // the program's state
    Options options;
    Model model;
    struct Pass *pass; // NULL with -DPLAIN, or to tokenize
    Tokenizer tokenizer;
    Mode mode;         // -m, or what the model is made for
    int kind;          // of results: mode, or CHOICES, or OWN_CHOICES
    Bytes file;        // the model's
    // The texts:
    Text places[MOST_TEXTS];
    Slot slots[MOST_TEXTS];
    Text *order[MOST_TEXTS];
    int n_running;
    int n_texts;       // texts that run or wait
    int most_texts;    // the maximum of n_texts
    size_t n_rows;     // tokens that ran so far
    double prompt_end; // when the first text had run its prompt, or 0
    // Answers, their thinking, and given answers (-o):
    bool can_switch;   // the chat format can switch thinking on and off
    bool switched_on;  // -r has switched it on
    bool thinks;       // the prompt ends inside <think>
    bool may_think;    // the prompt does, or the model may begin with <think>
    Ids budget_text;   // what ends thinking that has reached it
    Ids after_think;   // a newline, and another: put after </think> before given answers or a form
    Form *form;        // of the answers (-g), or NULL
    Choices next;      // the given answers of the next text: of -o, or with -o @NAME of its row
    size_t reserve;    // with -o: tokens that must fit after that text's prompt
    // Many texts at once only:
    double *row_nll;   // (logit_rows) -log(probability) of the id after each, if it is there
    Kept kept[MOST_KEPTS];  // the last one makes room first: see find_least
    int n_kept;
    int *users;        // (Pass.n_blocks) how many texts that run, and Kepts, have this block
    int n_unused;      // blocks that nobody has
    bool stopped;      // Ctrl-C stopped the last pass: states of texts that ran belong to no ids
    int credit;        // of drafts: see there
    float *before[MOST_GUESSED];  // (state_size) of the text at order[i], to go back to
    // Prompts, and what was said of them:
    Conversation conversation;  // of a chat, or of a list's line
    Buffer input;      // the prompt's text, the message being typed, or a JSON line's last string
    Ids prompt;
    Sampler sampling;  // of all texts: each has its own rng, this one is of the next answer
    bool dialogue;     // a conversation at a terminal: it goes on after a wrong message
    Buffer not_utf8;   // the notice of the first text that is not UTF-8
    bool gave_notices, gave_not_utf8, gave_escape, gave_blank_choice, gave_blank_prompt;  // once
} Engine;

static bool chooses(const Engine *e) { return e->kind >= CHOICES; }  // among given answers (-o)

// Returns how many Kepts there are: one of each text; for marks 4, in one place fewer; and with
// `steps` (-K and states) those at steps.
static int count_kepts(int texts, bool list, bool steps) {
    return texts + (texts > 1 ? 4 : list ? 2 : 1) + (steps ? KEPT_STEPS : 0);
}

// Returns how many states of delta layers there are: of texts, of Kepts, and those to go back to.
static int count_states(int texts, bool list, bool steps) {
    return texts + count_kepts(texts, list, steps) + min_int(texts, MOST_GUESSED);
}

static void writer_thinks(struct Writer *out, bool thinking);  // see Writing
static void start_asking(Engine *e, Text *t, bool goes_on);    // this and the next: Given answers
static bool next_choice(Engine *e, Text *t);

// Many texts at once has these, and -DPLAIN, too, where nothing is kept:
static void go_back(Engine *e, Text *t, size_t n);  // n_run becomes n or less: the rest runs again
static void keep_text(Engine *e, Text *t);          // keeps what ran of it for later texts

static const char *why_failed(const Text *t) {
    return t->slot->too_many
        ? "-g: too many ways to go on, expected fewer: no counts or repeats inside others"
        : "model: its results are not finite; is the file damaged?";
}

// Goes on with the next piece of a text that is scored. Returns false if there is none. A text
// longer than the context has several: each begins with the last id of the one before.
static bool next_piece(Engine *e, Text *t) {
    const Ids *whole = &t->slot->own.prompt;
    const size_t begin = t->ids.p + t->ids.n - 1 - whole->p, left = whole->n - begin;
    if (t->ending == FAILED || left == 1) return false;
    go_back(e, t, 0);
    t->ids.p = whole->p + begin;
    t->ids.n = t->n_prompt = min_size(left, t->context);
    t->target = 1;
    return true;
}

// Fills the memory of a text's place with what it begins with.
static void fill_place(Engine *e, Text *t, const Ids *prompt) {
    Slot *slot = t->slot;
    Ids *own = &slot->own.prompt;
    const Choices last = slot->own.choices;
    const size_t vocab_size = e->tokenizer.vocab_size;
    own->p = grow(own->p, &own->cap, prompt->n, e->model.context + 1, sizeof(int));
    memcpy(own->p, prompt->p, prompt->n * sizeof(int));
    own->n = prompt->n;
    slot->own.out.n = 0;
    slot->own.nll = grow(slot->own.nll, &slot->own.nll_cap, 0, e->next.n, sizeof(double));
    slot->own.choices = e->next;
    if (e->kind == OWN_CHOICES) e->next = last;  // its memory serves the row after this one
    memset(t->sampler.in_answer, 0, vocab_size * sizeof(bool));
    memset(t->sampler.seen, 0, vocab_size * sizeof(bool));
    for (size_t i = 0; i < prompt->n; i++) t->sampler.seen[prompt->p[i]] = true;
}

// Adds a prompt's text, to wait. goes_on: it ends in an answer's beginning, or after thinking.
static Text *add_text(Engine *e, const Ids *prompt, uint64_t rng, bool goes_on) {
    Text *t = e->order[e->n_texts++];
    Slot *slot = t->slot;
    const Options *o = &e->options;
    const size_t n = prompt->n;
    fill_place(e, t, prompt);
    *slot = (Slot){.engine = e, .own = slot->own, .start = now(), .closed_by = NOT_CLOSED,
                   .asker = slot, .thinking = e->thinks && !goes_on,
                   .watched = o->n < -1 ? n : INT_MAX,
                   .form = e->may_think && !goes_on ? FORM_OPEN : FORM_START};
    *t = (Text){.ids = slot->own.prompt, .target = n, .n_prompt = n, .context = e->model.context,
                .max_ids = o->n < 0 ? SIZE_MAX : n + o->n, .embeds = e->mode == EMBED,
                .sampler = t->sampler, .writer = t->writer, .slot = slot};
    t->sampler.rng = rng;
    writer_thinks(t->writer, slot->thinking);
    // From the generation prompt on, the next turn differs. This prompt is taken to begin with the
    // last SPECIAL token. (A list's text that is alone may be a turn of another program's chat.)
    size_t *mark = &slot->next_turn_at;
    if (e->mode == CHAT && (chooses(e) || e->n_texts == 1)) *mark = n - 1;
    while (*mark > 0 && !(e->tokenizer.kind[prompt->p[*mark]] & SPECIAL)) --*mark;
    if (e->mode == PERPLEXITY) t->ids.n = 1, next_piece(e, t);  // it begins with the last of ids
    if (chooses(e)) start_asking(e, t, goes_on);
    return t;
}

// Frees the place of a text that has ended, or is stopped. What has run is kept.
static void remove_text(Engine *e, Text *t) {
    int at = 0;
    if (t->ending == GOES_ON) t->ending = INTERRUPTED;
    keep_text(e, t);
    while (e->order[at] != t) at++;
    e->n_running -= at < e->n_running;
    e->n_texts--;
    memmove(e->order + at, e->order + at + 1, (e->n_texts - at) * sizeof(*e->order));
    e->order[e->n_texts] = t;
}

// Goes on with the next piece or given answer of a text, or else frees its place and returns true.
static bool end_text(Engine *e, Text *t) {
    const bool more = chooses(e) ? next_choice(e, t) : e->mode == PERPLEXITY && next_piece(e, t);
    if (more) t->ending = GOES_ON;
    else remove_text(e, t);
    return !more;
}

// Makes the masks that a text's next draws need, if it is to draw: in turns the first one, else
// also those after guesses. Its state is made again if all were forgotten.
static void prepare_text(const Engine *e, const Text *t, bool again, bool draws) {
    Form *f = e->form;
    Slot *slot = t->slot;
    const Bytes *text = e->tokenizer.text;
    const bool begun = slot->form != FORM_START && slot->form != FORM_OPEN;
    size_t at = again && begun ? slot->form_start : t->ids.n;
    if (at < t->ids.n) slot->form = FORM_START;
    for (; at < t->ids.n; at++, f->work = 0)
        slot->form = state_after(f, slot->form, text[t->ids.p[at]]);
    const int guesses = f->takes_turns ? 0 : slot->guesses;
    int state = slot->thinking || !draws ? LEFT : slot->form;
    for (int i = 0; state != LEFT; i++) {
        make_mask(f, &e->tokenizer, state);
        state = i < guesses ? state_after(f, state, text[t->ids.p[at + i]]) : LEFT;
    }
}

// Forgets all states and returns true if they are many, a limit was reached, or texts take turns.
static bool forget_states(Form *f) {
    const bool many = f->n_states > MOST_STATES / 2 || f->size > MOST_SIZE / 2;
    const bool forgets = many || f->full || f->takes_turns;
    if (forgets) start_states(f);
    return forgets;
}

#ifdef PLAIN
static void go_back(Engine *e, Text *t, size_t n) { (void)e, (void)n, t->n_run = 0; }
static void keep_text(Engine *e, Text *t) { (void)e, (void)t; }
static void start_texts(Engine *e) { (void)e; }
static void prepare_passes(Engine *e, int context) { (void)context, state_init(&e->model); }
static void load_kept(const Engine *e, int list) {
    (void)e, (void)list, notice("-K: no effect with -DPLAIN");
}

static bool run_pass(Engine *e) {  // a whole text
    Text *t = e->order[0];
    e->n_running = 1;
    run_text(&e->model, &e->tokenizer, t);
    e->n_rows += t->n_run;
    return t->ending != INTERRUPTED;
}
#else  // not PLAIN, up to the end of the section "A file of what is kept"
// ------------------------------------------------------------------------------------------------
// Many texts at once. To decode a token, a CPU reads all weights; they serve a token of each of 32
// texts just as well. So texts run together, and come and go from pass to pass (continuous
// batching: Orca, OSDI 2022). No row sees another text, and a batch gives the same bits as single
// tokens: each answer is the one that its text gets alone. A conversation has one text at a time.
//
// The cache is a pool of blocks, which a text takes as it grows (a paged KV cache: vLLM, arXiv
// 2309.06180): it holds many texts that could become long, but mostly do not. When a text ends, its
// blocks go to a Kept. A text takes the ids with which it begins from a Kept or a text that runs
// (prefix sharing): each block counts its users. A turn begins like the turn before it, and the
// texts of a list often begin with one instruction. When no block is left, Kepts lose theirs, first
// the last one. Then the youngest has to stop, and later runs again (preemption by recomputation).
//
// The invariant: a row is written only into a block with one user, and what counts as run (n_run;
// guesses do not) is never written again. So whoever shares a block finds in it what ran there. The
// contract of give_beginning and go_back: at most the ids asked for count as run. Others run again.
//
// A state of delta layers can't be cut: it is taken whole, or not at all. So a Kept is also made at
// marks, where texts will go on: where texts of a list part, before a chat's generation prompt
// (the next turn differs from there on), at the end of a prompt with given answers. The pass itself
// saves the state there. A text that goes back gives all away, and begins again from a Kept.

#ifndef CHECKED  // with it, the tests' functions of these names assert the invariant
#define check_rows(e, n) (void)0
#define check_copy(e, to, from) (void)0
#define check_state_copy(to, from) (void)0
#define check_loaded(e, kept) (void)0
#define give_up(n) (n)  // theirs draws a number up to n
#define guess_any(e, t, count, from) ((void)(e), (from))  // theirs guesses ids that nobody found
#endif

static bool has_delta(const Engine *e) { return state_size(&e->model.config) > 0; }

static void add_block(Engine *e, Blocks *blocks, int block) {
    e->n_unused -= e->users[block]++ == 0;
    blocks->p[blocks->n++] = block;
}

// Gives back all blocks but the first n.
static void cut_blocks(Engine *e, Blocks *blocks, int n) {
    while (blocks->n > n) e->n_unused += --e->users[blocks->p[--blocks->n]] == 0;
}

// Returns how many blocks n positions take.
static int count_blocks(const Engine *e, size_t n) {
    return (int)((n + e->pass->block_len - 1) / e->pass->block_len);
}

// Gives back the blocks after n ids, and one that n cuts if others use it: the text would write it.
static void go_back(Engine *e, Text *t, size_t n) {
    Blocks *blocks = &t->slot->own.blocks;
    const size_t len = e->pass->block_len;
    n = give_up(min_size(n, t->n_run));
    if (has_delta(e) && n < t->n_run) n = 0;  // schedule takes what is kept
    if (n % len && e->users[blocks->p[n / len]] > 1) n -= n % len;
    cut_blocks(e, blocks, count_blocks(e, n));
    t->n_run = n;
}

// Returns how many of n ids that ran, or will run, a text can take: those with which it begins. The
// id before its target is not taken: it always runs, because its logits are needed.
static size_t count_common(const Text *t, const int *ids, size_t n) {
    size_t same = 0;
    n = min_size(n, t->target - 1);
    while (same < n && ids[same] == t->ids.p[same]) same++;
    return same;
}

// Makes a Kept the first one, the one that was used last.
static void use_kept(Engine *e, Kept *kept) {
    const Kept used = *kept;
    memmove(e->kept + 1, e->kept, (kept - e->kept) * sizeof(*kept));
    e->kept[0] = used;
}

// Returns the Kept that the next one replaces: the last. But with -K, states and one place it is an
// empty one, or one with which the text does not begin, or else the one whose loss makes a rerun of
// the text longer by the smallest factor. (+ 64: short reruns count little.)
static Kept *find_least(Engine *e, const Text *t) {
    Kept *const last = &e->kept[e->n_kept - 1], *least = last;
    double lowest = INFINITY;
    if (!e->options.keep || !has_delta(e) || e->most_texts > 1) return last;
    for (Kept *k = last; k >= e->kept; k--) {
        const bool begins = k->n > 0 && count_common(t, k->ids, k->n) == k->n;
        size_t before = 0;  // ids of the Kept in its place (right if the text begins with all)
        for (const Kept *other = e->kept; other <= last; other++)
            if (other->n < k->n && other->n > before) before = other->n;
        const double ratio = begins ? (t->ids.n - before + 64.0) / (t->ids.n - k->n + 64) : 0;
        if (ratio < lowest && !k->maker) lowest = ratio, least = k;
    }
    return least;
}

// What ran of a text becomes a Kept in place of the least: mostly the one that was used longest
// ago. With states and several places it comes last, because other texts part before it.
static void keep_text(Engine *e, Text *t) {
    Blocks *blocks = &t->slot->own.blocks;
    const size_t n = has_delta(e) && e->stopped ? 0 : t->n_run;
    cut_blocks(e, blocks, count_blocks(e, n));
    if (n == 0) return;
    Kept *kept = find_least(e, t), old = *kept;
    *kept = (Kept){.ids = old.ids, .n = n, .blocks = *blocks, .state = t->slot->own.state};
    memcpy(kept->ids, t->ids.p, n * sizeof(int));
    *blocks = old.blocks;
    t->slot->own.state = old.state;
    cut_blocks(e, blocks, 0);
    if (!has_delta(e) || e->most_texts == 1) use_kept(e, kept);
}

// Adds n unused blocks. Kepts may lose theirs for it, but with `spare` and states none to which a
// text that runs may go back. Returns false, and adds none, if fewer than `spare` would be unused.
static bool add_unused(Engine *e, Blocks *blocks, int n, int spare) {
    for (int i = e->n_kept - 1; i >= 0 && e->n_unused < n + spare; i--) {
        Kept *kept = &e->kept[i];
        bool needed = kept->maker;
        for (int j = 0; spare && has_delta(e) && kept->n && j < e->n_running; j++)
            needed |= count_common(e->order[j], kept->ids, kept->n) == kept->n;
        if (needed) continue;
        cut_blocks(e, &kept->blocks, 0);
        kept->n = 0;
    }
    if (e->n_unused < n + spare) return false;
    for (int block = 0; n > 0; block++) {
        if (e->users[block]) continue;
        add_block(e, blocks, block);
        n--;
    }
    return true;
}

// Gives a text the blocks that it lacks for its ids and `more`, as add_unused does.
static bool take_blocks(Engine *e, Text *t, int more, int spare) {
    const size_t n = min_size(t->ids.n + more, t->context);  // the last id may not fit, nor run
    Blocks *blocks = &t->slot->own.blocks;
    return add_unused(e, blocks, count_blocks(e, n) - blocks->n, spare);
}

// Fills `blocks`, empty so far, with n positions of `from`: whole ones are shared, the cut one is
// copied. Returns false if no block is unused for the copy.
static bool share_blocks(Engine *e, Blocks *blocks, Blocks from, size_t n) {
    const int whole = (int)(n / e->pass->block_len);
    while (blocks->n < whole) add_block(e, blocks, from.p[blocks->n]);
    if (count_blocks(e, n) == whole) return true;
    if (!add_unused(e, blocks, 1, 0)) return false;
    cache_copy(e->pass, blocks->p[whole], from.p[whole]);  // still there, if a Kept has lost it now
    check_copy(e, blocks->p[whole], from.p[whole]);
    return true;
}

// Finds what a text can take the most ids from: a Kept, and this counts as its use, or a text that
// runs. The result's n is the number of these ids: with a state, all that ran into it, or none. The
// rest is still the Kept's or that text's own: it is good until something is kept.
static Kept find_beginning(Engine *e, const Text *t) {
    Kept best = {0};
    int from = -1;
    for (int i = 0; i < e->n_kept + e->n_running; i++) {
        const Text *other = i < e->n_kept ? NULL : e->order[i - e->n_kept];
        const Kept there = other ? (Kept){.ids = other->ids.p, .n = other->n_run,
                                          .blocks = other->slot->own.blocks,
                                          .state = other->slot->own.state} : e->kept[i];
        const size_t same = count_common(t, there.ids, there.n);
        if (same <= best.n || (has_delta(e) && same < there.n)) continue;
        best = there;
        best.n = same;
        from = i;
    }
    if (from >= 0 && from < e->n_kept) use_kept(e, &e->kept[from]);
    return best;
}

static void copy_state(const Engine *e, float *to, const float *from) {
    memcpy(to, from, state_size(&e->model.config) * sizeof(float));
    check_state_copy(to, from);
}

// Gives a text its blocks, and what it takes from a beginning: these ids count as run. Returns
// false, and gives nothing, if fewer than `spare` blocks would stay unused.
static bool give_beginning(Engine *e, Text *t, Kept from, int spare) {
    Slot *slot = t->slot;
    const size_t some = give_up(from.n), n = has_delta(e) && some < from.n ? 0 : some;
    const bool shares = share_blocks(e, &slot->own.blocks, from.blocks, n);
    t->n_run = shares && !has_delta(e) ? n : 0;  // what is kept if it can't begin yet
    if (!take_blocks(e, t, 0, spare)) {  // always, if the block that n cuts is lacking
        keep_text(e, t);
        t->n_run = 0;
        return false;
    }
    if (n && has_delta(e)) copy_state(e, slot->own.state, from.state);
    t->n_run = n;
    return true;
}

// Marks the first place where a text that starts parts from another text or a Kept, a block or more
// after the n ids that it takes. (Before it takes blocks, because Kepts may lose theirs.)
static void set_mark(Engine *e, const Text *t, size_t n) {
    const size_t least = n + e->pass->block_len;
    size_t *mark = &t->slot->parts_at;
    *mark = 0;
    for (int i = 0; i < e->n_kept + e->n_texts; i++) {
        const Text *other = i < e->n_kept ? NULL : e->order[i - e->n_kept];
        const size_t same = other ? count_common(t, other->ids.p, other->ids.n)
                                  : count_common(t, e->kept[i].ids, e->kept[i].n);
        if (other != t && same >= least && (*mark == 0 || same < *mark)) *mark = same;
    }
}

// Returns true if a text will soon have run a block more of t's ids than the n it can take now.
static bool should_wait(const Engine *e, const Text *t, size_t n) {
    for (int i = 0; i < e->n_running; i++) {
        const Text *other = e->order[i];
        const size_t same = count_common(t, other->ids.p, other->ids.n);
        const size_t end = has_delta(e) ? other->slot->parts_at : same;
        if (end >= n + e->pass->block_len && end <= same && end > other->n_run) return true;
    }
    return false;
}

// Starts the first text that waits. Returns false if it waits on, for another text or for blocks:
// for each text that runs then, one has to stay unused, with states one more. Alone it takes all.
static bool start_text(Engine *e) {
    Text *t = e->order[e->n_running];
    const Kept from = find_beginning(e, t);
    const int each = has_delta(e) ? 2 : 1, spare = e->n_running ? each * (e->n_running + 1) : 0;
    if (should_wait(e, t, from.n)) return false;
    if (has_delta(e)) set_mark(e, t, from.n);
    if (!give_beginning(e, t, from, spare)) return false;
    if (!t->slot->started) t->slot->cached = t->n_run;
    t->slot->started = true;
    e->n_running++;
    return true;
}

static void start_texts(Engine *e) {
    while (e->n_running < e->n_texts && start_text(e)) {}
}

// Sets which texts run: if one needs a block for its answer, the youngest may have to stop for it.
static void schedule(Engine *e) {
    for (int i = 0; i < e->n_running; i++) {
        Text *t = e->order[i];
        if (t->slot->own.blocks.n == 0) give_beginning(e, t, find_beginning(e, t), 0);  // went back
        while (i < e->n_running && !take_blocks(e, t, 0, 0))
            go_back(e, e->order[--e->n_running], 0);
    }
    start_texts(e);
}

// ------------------------------------------------------------------------------------------------
// Drafts: prompt lookup decoding (Saxena 2023). An answer often repeats what the context holds:
// code that it changes, text that it quotes. Where the last NGRAM tokens occurred before, the
// tokens that followed there are a draft of what comes next. Random numbers are drawn only for rows
// that are used. So drafts change the time and nothing else: the text is the same, not just its
// distribution as in speculative decoding (Leviathan et al., arXiv 2211.17192).
//
// All texts of a pass share draft_rows rows; a text gets twice as many after a draft without a
// wrong id. Each pass earns 1, a right token DRAFT_COST, and a wrong one costs as much: so it is
// paid for by a right one, by 20 passes or, 40 times, by saved credit. With -b 1, or while a prompt
// runs, nothing is guessed; below 0 only what a form (-g) prescribes, because this is mostly right:
// down to -MOST_CREDIT. For such ids texts take up to 2 draft_rows together, the first text first.
//
// A state of delta layers can't lose a wrong guess. Then the text takes the state that was saved
// before its guesses, and the right ones run again in the next pass, without new guesses.
enum { NGRAM = 5, DRAFT_COST = 20, MOST_CREDIT = 40 * DRAFT_COST };

// Returns the byte that has to come after a text, or -1. If only blanks may stand beside it, it
// guesses the byte that followed where the text's last blanks, and what is before them, stood last.
static int guess_byte(Form *f, int state, Bytes text) {
    int only = -1, n = 0, others = 0;
    size_t k = 1;
    if (f->states[state].n > 8 || f->states[state].may_end) return -1;
    for (int byte = 0; byte < 256; byte++) {
        if (next_state(f, state, byte) == LEFT) continue;
        only = byte, n++;
        others += !isspace(byte);
    }
    if (n == 1) return only;
    while (k < text.n && isspace(text.p[text.n - k])) k++;
    for (size_t end = text.n - 1; others < 2 && end >= k; end--)
        if (memcmp(text.p + end - k, text.p + text.n - k, k) == 0)
            return next_state(f, state, text.p[end]) != LEFT ? text.p[end] : -1;
    return -1;
}

// Guesses up to `most` ids after a text, where its form leaves one way, and returns how many. Left
// out is what ends in half a character or a space, because what follows mostly makes one id of it.
static int guess_form(const Engine *e, Text *t, int most) {
    const Tokenizer *tok = &e->tokenizer;
    const size_t n = t->ids.n;
    int state = t->slot->form, byte;
    Buffer text = {0};
    Ids ids = {0};
    e->form->work = 0;
    for (size_t i = n - min_size(n, 1000); i < n; i++) buffer_add(&text, tok->text[t->ids.p[i]]);
    const size_t begin = text.n;
    size_t end = begin;  // of the last whole character
    while (text.n < begin + 8 * most && (byte = guess_byte(e->form, state, bytes_of(&text))) >= 0) {
        buffer_add(&text, (Bytes){(uint8_t[]){byte}, 1});
        state = next_state(e->form, state, byte);
        if (e->form->states[state].lacks == 0) end = text.n;
    }
    text.n = end - (end > begin && text.p[end - 1] == ' ');
    encode_part(tok, bytes_from(bytes_of(&text), begin), false, &ids);
    const int guesses = min_int(most, (int)ids.n);
    for (int i = 0; i < guesses; i++) t->ids.p[n + i] = ids.p[i];
    free(text.p);
    free(ids.p);
    return guesses;
}

// Guesses what followed where a text's last ids stood before, if they did: up to `most` ids, or to
// the first with which its form, if any, can't go on. Returns how many. (It may copy guesses.)
static int guess_repeat(Engine *e, Text *t, bool has_form, int most) {
    const Tokenizer *tok = &e->tokenizer;
    int *ids = t->ids.p, guesses = 0, state = t->slot->form;
    const size_t n = t->ids.n, size = NGRAM * sizeof(int);
    size_t from = n - 1;  // the draft begins with ids[from]
    while (from >= NGRAM && memcmp(ids + from - NGRAM, ids + n - NGRAM, size) != 0) from--;
    from = guess_any(e, t, most, from);
    for (; guesses < most && from >= NGRAM; guesses++) {
        const int id = ids[n + guesses] = ids[from + guesses];
        if (!has_form) continue;
        e->form->work = 0;
        state = state_after(e->form, state, tok->text[id]);
        if (state == LEFT || tok->kind[id] & SPECIAL) break;
    }
    return guesses;
}

// Guesses ids after a text: up to `most` that its form prescribes, else up to `share` that repeat
// earlier ones. The context, -n and unused blocks limit them. (If a form reaches a limit of states
// here, prepare_masks forgets all of them.)
static void draft_text(Engine *e, Text *t, int most, int share) {
    Slot *slot = t->slot;
    const bool has_form = e->form && !slot->thinking && !e->form->takes_turns;
    const size_t end = min_size(t->context, t->max_ids);
    const size_t room = (size_t)(slot->own.blocks.n + e->n_unused) * e->pass->block_len;
    most = min_int(most, (int)min_size(end, room) - (int)t->ids.n);
    if (most < 1) return;
    if (has_form && e->credit >= -MOST_CREDIT) slot->guesses = guess_form(e, t, most);
    if (slot->guesses == 0 && e->credit >= 0 && share > 0)
        slot->guesses = guess_repeat(e, t, has_form, min_int(share, most));
    e->credit -= DRAFT_COST * slot->guesses;
    take_blocks(e, t, slot->guesses, 0);
}

// Guesses for all texts if each of them decodes: all its ids but the last, a drawn one, have run.
static void draft_texts(Engine *e) {
    bool decodes = modes[e->mode].has_answers && e->n_running <= MOST_GUESSED;
    // Each guess must get a row of logits, because draw reads it. make_rows has room for these.
    const int tile = e->pass->draft_rows, rows = min_int(2 * tile, e->pass->logit_rows);
    int left = rows - e->n_running;  // guesses that still get a row
    e->credit = min_int(e->credit + 1, MOST_CREDIT);
    for (int i = 0; i < e->n_running; i++) {
        const Text *t = e->order[i];
        decodes &= t->n_run >= t->n_prompt && t->n_run + 1 == t->ids.n;
        e->credit += 2 * DRAFT_COST * t->slot->right;
    }
    for (int i = 0; i < e->n_running; i++) {
        Text *t = e->order[i];
        const bool whole = t->slot->right > 0 && t->slot->right == t->slot->guesses;
        t->slot->guesses = t->slot->right = 0;
        const int share = min_int((1 + whole) * tile, rows) / e->n_running - 1;
        if (decodes) draft_text(e, t, left, share);
        left -= t->slot->guesses;
    }
}

// ------------------------------------------------------------------------------------------------
// A pass: the ids that have not run, of all texts, as many as fit

// With -K, returns true where a block ends 64, 512, 4,096, ... ids (up to a block more) before the
// end of a prompt that is alone, or before parts_at where several texts run or wait.
static bool is_step(const Engine *e, const Text *t, size_t n) {
    const size_t end = e->n_texts == 1 ? t->n_prompt : t->slot->parts_at;
    size_t len = e->pass->block_len, step = 64;
    while (n + step + len <= end) step *= 8;
    return e->options.keep && n % len == 0 && n + step <= end;
}

// With states, if n ids end at a mark or a step, begins a Kept of them: the least makes room.
// Returns where this pass saves the state. NULL: none is saved, or it makes all Kepts already.
static float *make_kept(Engine *e, const Text *t, size_t n) {
    const bool marked = n == t->slot->parts_at || n == t->slot->next_turn_at || is_step(e, t, n);
    Kept *kept = has_delta(e) && marked ? find_least(e, t) : NULL;
    if (!kept || kept->maker) return NULL;
    cut_blocks(e, &kept->blocks, 0);
    memcpy(kept->ids, t->ids.p, n * sizeof(int));
    kept->n = n;
    kept->maker = t;
    use_kept(e, kept);
    return e->kept[0].state;
}

// Gives a Kept its blocks if the last pass ran and has saved its state; else it keeps nothing.
static void finish_kept(Engine *e, Kept *kept, bool ran) {
    const Blocks *blocks = &kept->maker->slot->own.blocks;
    if (!ran || !share_blocks(e, &kept->blocks, *blocks, kept->n)) kept->n = 0;
    kept->maker = NULL;
}

// Makes the rows of the next pass and returns how many they are. Each text that runs gets one at
// least (no more texts run than -b has rows, nor than get logits), the first ones what fits. A row
// needs logits if the id after it is to be drawn or scored: so of a prompt's rows only the last
// does. A scored text's last id need not run.
static int make_rows(Engine *e) {
    Pass *p = e->pass;
    int n = 0, n_needed = 0;
    for (int i = 0; i < e->n_running; i++) {
        Text *t = e->order[i];
        Slot *slot = t->slot;
        const size_t end = t->target < t->ids.n ? t->ids.n - 1 : t->ids.n + slot->guesses;
        const int later = e->n_running - 1 - i;  // a row is kept for each text that follows
        slot->first = n_needed;
        slot->rows = 0;
        for (size_t pos = t->n_run; pos < end; pos++) {
            const bool needed = pos + 1 >= t->target;
            if (n + later == p->batch || n_needed + later == p->logit_rows) break;
            const bool drafted = slot->guesses && pos + 1 == t->ids.n;
            float *saved = drafted ? e->before[i] : make_kept(e, t, pos + 1);
            p->rows[n++] = (Row){t->ids.p[pos], (int)pos, slot->own.blocks.p, slot->own.state,
                                 saved, needed, t};
            n_needed += needed;
            slot->rows += pos < t->ids.n;  // draw adds a right guess to n_run
        }
    }
    return n;
}

static float *logits_of(const Engine *e, int row) {
    return e->pass->logits + (size_t)row * e->tokenizer.vocab_size;
}

// Draws the next id, in a list on any thread: so it reports nothing, and what it calls only reads
// the form. (If texts take turns, one thread draws.) If the id was guessed, the row of the guess
// has run, too: its logits give the id after it, and so on. Another id takes the place of the
// guess, and later its place in the cache.
static void draw(Engine *e, int i) {
    Text *t = e->order[i];
    Slot *slot = t->slot;
    for (int row = slot->first; !interrupted; row++) {
        const size_t n = t->ids.n;
        const int guess = slot->right < slot->guesses ? t->ids.p[n] : -1;
        const bool was_thinking = slot->thinking;
        t->ending = draw_next(&e->tokenizer, t, logits_of(e, row));
        // Where thinking begins or ends, the mask of the next id is not made yet.
        const bool turned = t->ids.n > n + 1 || slot->thinking != was_thinking;
        if (t->ending != GOES_ON || turned || t->ids.p[n] != guess) break;
        slot->right++;
    }
    if (!has_delta(e) || slot->right == slot->guesses) t->n_run += slot->right;
    else copy_state(e, slot->own.state, e->before[i]);  // the right ones run again
}

// Does what use_output does, for all texts: first for the rows whose next id is there, then for
// each text. (A row of a text that is drawn is left alone: draw needs its logits.)
static void end_pass(void *arg) {
    Engine *e = arg;
    EACH (i, e->mode == EMBED ? 0 : e->pass->n_needed, 1) {
        const Row *row = &e->pass->rows[i];
        const Ids *ids = &row->text->ids;
        const size_t next = row->pos + 1;
        if (next < ids->n) e->row_nll[i] = nll_of(&e->tokenizer, logits_of(e, i), ids->p[next]);
    }
    EACH (i, e->n_running, 1) {
        Text *t = e->order[i];
        int row = t->slot->first;
        float *x = e->pass->x + (size_t)row * e->model.config.dim;
        if (t->n_run < t->target) continue;  // its next id is taken as it is
        if (t->embeds) t->ending = embed_text(&e->model, t, x);
        else if (t->target == t->ids.n) draw(e, i);
        else while (t->target <= t->n_run) t->ending = add_nll(t, e->row_nll[row++]);
    }
}

static void prepare_passes(Engine *e, int context) {
    const int batch = e->options.batch;
    // Rows of logits in a pass: one for each text, or many of a text that is scored
    const int rows = min_int(e->mode == PERPLEXITY ? 128 : MOST_TEXTS, batch);
    if (!e->pass) e->pass = pass_init(&e->model, batch, rows, e->most_texts);  // tests bring theirs
    const int n = count_blocks(e, context);
    e->n_unused = e->pass->n_blocks;
    e->users = alloc(e->pass->n_blocks, sizeof(int), "the texts");
    e->row_nll = alloc(e->pass->logit_rows, sizeof(double), "the texts");
    const size_t size = state_size(&e->model.config);
    e->n_kept = count_kepts(e->most_texts, e->options.list, e->options.keep && has_delta(e));
    for (int i = 0; i < e->n_kept; i++) {
        e->kept[i] = (Kept){.ids = alloc(context, sizeof(int), "the texts")};
        e->kept[i].blocks.p = alloc(n, sizeof(int), "the texts");
        e->kept[i].state = alloc(size, sizeof(float), "states (try -b 1)");
        if (i >= e->most_texts) continue;
        e->slots[i].own.blocks.p = alloc(n, sizeof(int), "the texts");
        e->slots[i].own.state = alloc(size, sizeof(float), "states (try -b 1)");
        if (i < MOST_GUESSED) e->before[i] = alloc(size, sizeof(float), "states (try -b 1)");
    }
}

// Makes the masks of all draws of a pass: so threads only read the form. If they are too many, the
// texts take turns (see allowed_ids), and no threads draw.
static void prepare_masks(const Engine *e) {
    Form *f = e->form;
    const bool again = forget_states(f);
    f->takes_turns = false;
    for (int i = 0; i < e->n_texts; i++) prepare_text(e, e->order[i], again, i < e->n_running);
    f->takes_turns = f->full;
    f->turn = NULL;
}

static bool run_pass(Engine *e) {  // returns false after Ctrl-C
    (void)encode_piece, (void)run_text, (void)state_init;  // -DPLAIN uses these definitions
    schedule(e);
    draft_texts(e);
    const int n = make_rows(e);
    // Ctrl-C in a chat's prompt, or with -K: what ran before stays, unless texts run together.
    Text *first = e->order[0];
    const bool stays = e->dialogue || (e->options.keep && e->n_running == 1);
    const bool saves = has_delta(e) && stays && first->n_run < first->n_prompt;
    if (saves) copy_state(e, e->before[0], first->slot->own.state);  // there are no guesses yet
    check_rows(e, n);
    if (n == 0 && !interrupted)  // after Ctrl-C draw adds no id: then there is no row
        die("texts: %d wait and none can run; please report this", e->n_texts);
    const bool ran = n > 0 && forward_rows(e->pass, n);
    for (int i = 0; i < e->n_kept; i++)
        if (e->kept[i].maker) finish_kept(e, &e->kept[i], ran);
    if (saves && !ran) copy_state(e, first->slot->own.state, e->before[0]);
    e->stopped = n > 0 && !ran && !saves;
    if (!ran) return false;
    for (int i = 0; i < e->n_running; i++) e->order[i]->n_run += e->order[i]->slot->rows;
    e->n_rows += n;
    if (e->pass->n_needed == 0) return true;
    if (e->prompt_end == 0) e->prompt_end = now();
    if (e->mode != EMBED) classify(e->pass, e->pass->n_needed);
    if (e->form) prepare_masks(e);
    // A text that is alone is written as it is drawn: by the main thread, the only one whose write
    // Ctrl-C ends (write_stdout goes on with it).
    const bool one_draws = e->n_running == 1 || (e->form && e->form->takes_turns);
    if (!one_draws || e->mode == PERPLEXITY) on_all_threads(end_pass, e);
    else end_pass(e);
    return true;
}

// ------------------------------------------------------------------------------------------------
// A file of what is kept (-K FILE), for later runs whose prompts begin alike. When a run begins,
// FILE becomes Kepts. When it ends, FILE gets the first Kept, unless it has most of it already, and
// with states those with which its text begins. It is of the text that ended last; with states and
// several places, of what was taken, or made at a mark, last. A row's results are the same in all
// runs: FILE only saves time.
//
// Nobody knows where the next prompt will differ. So is_step makes Kepts such that it reruns at
// most 64 ids, or eight times those that differ, and a block. Where it does differ from FILE's
// text, set_mark makes one more, for the prompt after it. FILE has
//
//   Head             which Kepts there are, and what the bits of all else depend on
//   int ids[n]       of the text
//   block[]          for each block of n positions, floats or packed: see The KV cache
//   float state[]    with states for each Kept, the shortest first
//
// and after each of these parts its hash (u64). Ids and data are used once their hash was right.

enum { N_ORIGINS = 4 };
static const char *const origins[N_ORIGINS] = {"model", "version or CPU", "C library", "-C"};
#define MAGIC "q3kept1"

typedef struct {
    char magic[8];
    uint64_t origin[N_ORIGINS];  // of `origins`: hashes, and the number of -C
    uint64_t n[MOST_KEPTS];      // ids of each Kept, ascending, then 0; without states there is one
    char again[8];               // the magic: a damaged FILE still has one of them
} Head;
enum { IDS_AT = sizeof(Head) + sizeof(uint64_t) };

typedef struct {  // FILE, while it is read or written
    Engine *e;
    int fd;
    bool writes;
    Head head;
    int n_kepts;                // of Head
    Ids ids;
    uint64_t hash;              // of Head, then of Head and ids: the next part's begins with it
    // Here, from the first on, those that fit into the context and its Kepts:
    Blocks blocks;
    float *states[MOST_KEPTS];
    int n_states;
    _Atomic bool failed;        // to read or write these
} Filed;

// Returns a Head with all on which the bits of n ids' data depend. Of the model's file, the first
// 16 MB count and, if its header has no hash of the weights (older files), places after them.
// C libraries may differ in few roundings: so all angles of the n positions count, and log1pf.
static Head make_head(const Engine *e, size_t n) {
    const Bytes file = e->file;
    const size_t first = min_size(file.n, 1 << 24), half = e->model.config.rotary_dim / 2;
    const bool has_hash = load_i32(file.p + 0x9C) || load_i32(file.p + 0xA0);
    float *cos = e->pass->cos, *sin = e->pass->sin;
    const uint64_t build = hash_of(0, version(), strlen(version()));
    uint64_t model = hash_of(file.n, file.p, first), libm = 0;
    for (size_t at = first; at < file.n && !has_hash; at += at / 512)
        model = hash_of(model, file.p + at, min_size(file.n - at, 64));
    for (size_t pos = 0; pos < n; pos++) {
        const float logs[] = {log1pf(pos), log1pf(1 / (pos + 1.0f))};  // see rates_of
        rope_angles(&e->model.config, (int)pos, cos, sin);
        libm = hash_of(hash_of(libm, cos, half * sizeof(float)), sin, half * sizeof(float));
        libm = hash_of(libm, logs, sizeof(logs));
    }
    return (Head){MAGIC, {model, build, libm, e->options.cache_bits}, .again = MAGIC};
}

// Reads or writes the part at this byte of FILE, and its hash. Parts are written in order (see
// file_move). Returns the hash, or 0 if this fails, if FILE has another, or after Ctrl-C.
static uint64_t move_part(Filed *f, void *part, size_t size, size_t at) {
    if (interrupted || !file_move(f->fd, part, size, at, f->writes)) return 0;
    const uint64_t hash = hash_of(f->hash + at, part, size);
    uint64_t there = hash;
    const bool moved = file_move(f->fd, &there, sizeof(there), at + size, f->writes);
    return moved && there == hash ? hash : 0;
}

// Reads or writes part i of the blocks and states that are not left out.
static void move_data(Filed *f, int i) {
    const Pass *p = f->e->pass;
    const size_t floats = block_size(&p->m->config), hash = sizeof(f->hash);
    const size_t block = floats * sizeof(float), state = state_size(&p->m->config) * sizeof(float);
    const size_t at = IDS_AT + f->ids.n * sizeof(int) + hash;  // block 0; then state 0
    const size_t states_at = at + count_blocks(f->e, f->ids.n) * (block + hash);
    const int j = i - f->blocks.n;  // a state's number, or below 0
    const bool good = j < 0
        ? move_part(f, p->cache + f->blocks.p[i] * floats, block, at + i * (block + hash))
        : move_part(f, f->states[j], state, states_at + j * (state + hash));
    if (!good) f->failed = true;
}

static void read_data(void *arg) {
    const Filed *f = arg;
    EACH (i, f->blocks.n + f->n_states, 1) move_data(arg, i);
}

// Reads or writes what follows Head. (No threads write: the program may end within their loop.)
static bool move_rest(Filed *f) {
    f->hash = move_part(f, f->ids.p, f->ids.n * sizeof(int), IDS_AT);
    f->failed = f->hash == 0;
    if (!f->failed && !f->writes) on_all_threads(read_data, f);
    for (int i = 0; i < f->blocks.n + f->n_states && f->writes && !f->failed; i++) move_data(f, i);
    return !f->failed;
}

// Reads the Kepts that fit into the context. Returns false, and makes none, if FILE is damaged.
static bool read_kepts(Filed *f) {
    Engine *e = f->e;
    Kept *last = &e->kept[e->n_kept - 1];
    Blocks *blocks = &e->slots[0].own.blocks;
    const size_t context = e->model.context;
    int fit = 0;
    f->ids.p = grow(NULL, &f->ids.cap, 0, f->ids.n, sizeof(int));
    if (!has_delta(e)) f->head.n[0] = min_size(f->ids.n, context);  // it is cut
    for (; fit < min_int(f->n_kepts, e->n_kept) && f->head.n[fit] <= context; fit++)
        f->states[fit] = last[-fit].state;  // this Kept is `last` after `fit` calls of use_kept
    const size_t n = fit ? f->head.n[fit - 1] : 0;
    f->n_states = has_delta(e) ? fit : 0;
    add_unused(e, blocks, count_blocks(e, n), 0);  // as many as a context takes are there
    f->blocks = *blocks;
    const bool good = move_rest(f);
    for (int i = 0; i < fit && good; i++) {  // the last Kept becomes the first one
        last->n = f->head.n[i];
        memcpy(last->ids, f->ids.p, last->n * sizeof(int));
        for (int k = 0; k < count_blocks(e, last->n); k++)
            add_block(e, &last->blocks, blocks->p[k]);
        check_loaded(e, last);
        use_kept(e, last);
    }
    cut_blocks(e, blocks, 0);
    return good;
}

// Reads FILE. Returns why it can't be used, or NULL. If -K did not make it, ends the program.
static const char *read_filed(Filed *f) {
    const size_t size = file_size(f->fd), most = f->e->model.config.max_seq_len;
    const Head *head = &f->head;
    f->hash = move_part(f, &f->head, sizeof(Head), 0);
    if (memcmp(head->magic, MAGIC, min_size(size, 8)) && memcmp(head->again, MAGIC, 8))
        die("%s: not made by -K, expected such a file or a new name", f->e->options.keep);
    while (f->n_kepts < (has_delta(f->e) ? MOST_KEPTS : 1) && head->n[f->n_kepts] > f->ids.n)
        f->ids.n = head->n[f->n_kepts++];
    const Head ours = make_head(f->e, min_size(f->ids.n, most));
    for (int i = 0; i < N_ORIGINS && f->hash; i++)
        if (head->origin[i] != ours.origin[i]) return say("of another %s", origins[i]);
    return f->hash && f->ids.n > 0 && f->ids.n <= most && read_kepts(f) ? NULL : "damaged";
}

// Writes FILE: a text's Kept, after those with which it begins.
static bool write_filed(Filed *f, const Kept *text) {
    const Engine *e = f->e;
    f->head = make_head(e, text->n);
    f->ids = (Ids){text->ids, text->n, 0};
    f->blocks = text->blocks;
    for (size_t n = 0; n < text->n; f->n_kepts++) {
        const Kept *next = text;  // the shortest one of more than n ids
        for (const Kept *k = e->kept; k < e->kept + e->n_kept && has_delta(e); k++)
            if (!k->maker && k->n > n && k->n < next->n &&
                !memcmp(k->ids, text->ids, k->n * sizeof(int))) next = k;
        f->states[f->n_kepts] = next->state;
        f->head.n[f->n_kepts] = n = next->n;
    }
    f->n_states = has_delta(e) ? f->n_kepts : 0;
    f->hash = move_part(f, &f->head, sizeof(Head), 0);
    return f->hash && move_rest(f);
}

static Filed filed;  // as it was when the run began

// Returns how many ids of a Kept a run can take from FILE as it was.
static size_t count_filed(const Kept *text) {
    size_t same = 0, n = 0;
    while (same < min_size(filed.ids.n, text->n) && filed.ids.p[same] == text->ids[same]) same++;
    for (int i = 0; i < filed.n_kepts && filed.head.n[i] <= same; i++) n = filed.head.n[i];
    return has_delta(filed.e) ? n : same;
}

// Replaces FILE when the program ends, if more than an eighth of the text is not in it.
static void save_kept(void) {
    Engine *e = filed.e;
    const char *file = e->options.keep;
    const double start = now();
    char part[LONGEST_NAME], target[LONGEST_NAME];
    if (atomic_flag_test_and_set(&dying)) return;  // memory is short, perhaps within a job
    atomic_flag_clear(&dying);
    for (int i = 0; i < e->n_running && !has_delta(e); i++) keep_text(e, e->order[i]);
    const Kept *text = e->kept;
    while (text < e->kept + e->n_kept - 1 && (text->n == 0 || text->maker)) text++;
    if (text->maker || text->n - count_filed(text) <= text->n / 8) return;
    interrupted = 0;
    real_name(file, target);
    Filed out = {.e = e, .writes = true, .fd = file_create(target, part)};
    const bool whole = out.fd >= 0 && write_filed(&out, text);
    const double size = whole ? file_size(out.fd) / 1e6 : 0;  // else errno stays
    if (!file_replace(target, part, out.fd, whole))
        warn("%s: not replaced: %s", file, interrupted ? "Ctrl-C" : strerror(errno));
    else if (e->options.given['v'])
        report("%s: %zu tokens (%.1f MB) written in %.1f s", file, text->n, size, now() - start);
}

// Makes Kepts of FILE, if it is there, and replaces it when the program ends. list: the list's fd
static void load_kept(Engine *e, int list) {
    const char *file = e->options.keep, *error = NULL;
    const double start = now();
    const unsigned mode = file_mode(file);
    char part[LONGEST_NAME];
    if (mode && !S_ISREG(mode)) die("%s: not a regular file, expected one or a new name", file);
    const int fd = mode ? file_open(file, false) : file_create(file, part);  // it can be made
    if (fd < 0)
        die("%s: %s, expected a file that can be %s", file, strerror(errno),
            mode ? "read" : "made");
    if (same_file(fd, list) || same_file(fd, STDOUT_FILENO))
        die("%s: is -K's and %s, expected another FILE", file,
            same_file(fd, list) ? "the list" : e->options.out ? "-w's" : "stdout");
    filed = (Filed){.e = e, .fd = fd};
    if (file_size(fd) > 0) error = read_filed(&filed);
    if (error) notice("%s: %s, the run begins anew", file, error);
    else if (e->options.given['v'] && filed.blocks.n)
        report("%s: %zu tokens (%.1f MB) read in %.1f s", file, e->kept->n, file_size(fd) / 1e6,
               now() - start);
    if (error) filed.n_kepts = filed.ids.n = 0;
    if (mode) close(fd);
    else file_replace(file, part, fd, false);
    atexit(save_kept);
}
#endif  // not PLAIN

// ------------------------------------------------------------------------------------------------
// Writing: progress, messages, answers. Terminals get a file's and a model's text by add_printable.

static bool is_control(uint32_t c) { return c < ' ' || (c >= 127 && c < 160); }

// Appends a text for a terminal. U+FFFD replaces what is not UTF-8, control characters, and those
// that turn the text (a file's name can look like another's). An answer keeps \n, \r\n and \t.
static void add_printable(Buffer *out, Bytes text, bool answer) {
    for (size_t at = 0; at < text.n;) {
        const Char c = decode_at(text, at);
        const bool crlf = c.c == '\r' && at + 1 < text.n && text.p[at + 1] == '\n';
        const bool kept = answer && (c.c == '\n' || c.c == '\t' || crlf);
        const bool turns = (c.c >= 0x202A && c.c <= 0x202E) || (c.c >= 0x2066 && c.c <= 0x2069);
        const bool shown = kept || (c.c < BAD_BYTE && !is_control(c.c) && !turns);
        buffer_add(out, shown ? (Bytes){text.p + at, c.n} : bytes("\uFFFD"));
        at += c.n;
    }
}

// What a terminal shows of a prompt or a list that takes longer than two seconds
static struct Progress {
    size_t tokens;  // of the prompt that runs; 0: none does
    size_t done;    // tokens times layers that ran
    double start;   // when that prompt, or the list, began
    double painted; // when the line was last written
    bool shown;     // it is there
} progress;

// Clears the line, before an answer, a notice or an error begins. No prompt has progress any more.
static void progress_end(void) {
    if (progress.shown) fputs("\r\033[K", stderr);
    progress.shown = false;
    progress.tokens = 0;
}

#define RATE(x) (x) < 999.95, (x)  // for %.*f: it has a decimal only below 1,000

// Shows `label`, the rate of about `tokens` tokens so far, and the time for the rest if this rate
// stays: `part` of the work is done (0: unknown). (A prompt's rate falls: attention grows.)
static void progress_show(double tokens, double part, const char *label) {
    const double t = now(), seconds = t - progress.start, rate = tokens / seconds;
    if (quiet || seconds < 2 || t < progress.painted + 0.1 || !is_terminal(STDERR_FILENO)) return;
    progress.painted = t;
    progress.shown = true;
    fprintf(stderr, "\r%s, %.*f tokens/s", label, RATE(rate));
    if (part > 0) fprintf(stderr, ", %.0f s left", seconds * (1 / part - 1));
    fputs("\033[K", stderr);
}

INLINE void progress_add(int n, int n_layers) {  // n tokens ran through one of the layers
    if (progress.tokens == 0) return;
    progress.done += n;
    const size_t done = progress.done / n_layers, all = progress.tokens;
    if (done == all) progress_end();
    else progress_show(done, (double)done / all, say("%zu of %zu tokens", done, all));
}

// Writes results to stdout: to a terminal what it may show, after the progress.
static void write_results(Bytes text) {
    const bool terminal = is_terminal(STDOUT_FILENO);
    Buffer shown = {0};
    if (terminal) progress_end(), add_printable(&shown, text, true);
    write_stdout(terminal ? bytes_of(&shown) : text);
    free(shown.p);
}

static void report(const char *fmt, ...) {
    static char text[1 << 13];  // two paths and what is wrong; a longer message loses its end
    static uint8_t line[3 * sizeof(text) + 1];  // static: the stack may be small (ulimit -s)
    Buffer shown = {line, 0, sizeof(line)};  // never grows, because memory may have run out
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    add_printable(&shown, bytes(text), false);
    progress_end();
    fprintf(stderr, "qwen3: %.*s\n", (int)shown.n, line);
}

typedef struct Writer {
    bool chat;      // a newline ends the answer
    bool terminal;  // stdout is a terminal
    bool thinking;  // what comes now is thinking: see add_id
    bool trims;     // thinking has ended: newlines that follow are not written
    Buffer *to;     // of a list: gets the answer, and thinking is lost; NULL: it goes to stdout
    Bytes stop;     // -x: the answer ends before this text
    size_t cut;     // bytes that were drawn, but are not written because of it
    Buffer held;    // text that is not written yet
} Writer;

// Returns how many bytes at the end have to wait: those of an unfinished UTF-8 character, or for
// add_printable a carriage return, because it keeps only one before a newline.
static size_t unfinished(Bytes text, bool printable) {
    if (printable && text.n && text.p[text.n - 1] == '\r') return 1;
    for (size_t n = 1; n <= 3 && n <= text.n; n++)
        if (begins_char(bytes_from(text, text.n - n))) return n;
    return 0;
}

// Writes what is held but its last `keep` bytes, in one write: so no signal leaves a terminal dim.
static void writer_flush(Writer *out, size_t keep) {
    const Bytes text = {out->held.p, out->held.n - keep};
    const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");
    const bool plain = (no_color && *no_color) || (term && !strcmp(term, "dumb"));
    const bool dim = out->terminal && out->thinking && !plain;
    Buffer shown = {0};
    if (text.n == 0) return;
    if (dim) buffer_add(&shown, bytes("\033[2m"));
    if (out->terminal || out->thinking) add_printable(&shown, text, true);
    else buffer_add(&shown, text);
    if (dim) buffer_add(&shown, bytes("\033[0m"));
    if (out->to) buffer_add(out->to, out->thinking ? (Bytes){0} : bytes_of(&shown));
    else if (out->terminal || !out->thinking) write_stdout(bytes_of(&shown));
    else if (!quiet) fwrite(shown.p, 1, shown.n, stderr);
    buffer_cut(&out->held, text.n);
    free(shown.p);
}

// Sets whether thinking comes now. Called where an answer or its thinking begins or ends.
static void writer_thinks(Writer *out, bool thinking) {
    out->trims = out->thinking && !thinking;
    if (out->trims) buffer_add(&out->held, bytes(out->terminal ? "\n\n" : "\n"));
    writer_flush(out, 0);
    out->thinking = thinking;
}

// Returns what an answer has of a token: its bytes, but none of a SPECIAL one.
static Bytes text_of(const Tokenizer *tok, int id) {
    return tok->kind[id] & SPECIAL ? (Bytes){0} : tok->text[id];
}

static bool writer_token(Writer *out, const Tokenizer *tok, int id) {
    Buffer *held = &out->held;
    Bytes text = text_of(tok, id);
    while (out->trims && text.n && *text.p == '\n') text = bytes_from(text, 1);
    out->trims &= text.n == 0;
    buffer_add(held, text);
    const Bytes stop = out->thinking ? (Bytes){0} : out->stop;
    size_t at = stop.n ? 0 : held->n;  // where the stop text begins, or may begin, or the end
    while (at < held->n && memcmp(held->p + at, stop.p, min_size(stop.n, held->n - at)) != 0) at++;
    if (stop.n && held->n - at >= stop.n) {
        out->cut = held->n - at;
        held->n = at;
        return false;
    }
    const size_t waits = unfinished((Bytes){held->p, at}, out->terminal || out->thinking);
    writer_flush(out, held->n - at + waits);
    return true;
}

// Ends an answer. One U+FFFD stands for half a character at its end.
static void writer_end(Writer *out) {
    const size_t half = unfinished(bytes_of(&out->held), false);
    const bool ended = out->terminal && out->thinking;  // the line, by writer_thinks
    out->held.n -= half;
    buffer_add(&out->held, bytes(half ? "\uFFFD" : ""));
    writer_thinks(out, false);
    if (!out->to && !ended && (out->chat || out->terminal)) write_stdout(bytes("\n"));
}

// ------------------------------------------------------------------------------------------------
// Thinking, and how it and an answer end

static const char end_of_budget[] =  // of Qwen3's technical report, section 4.3
    "\n\nConsidering the limited time by the user, I have to give the solution based on the "
    "thinking directly now.\n</think>\n\n";

// What ends an answer, or thinking; its name is the "end" of an object.
static const struct { const char *by, *name; } endings[] = {
    [BY_BUDGET] = {"-r", NULL}, [COMPLETE] = {"an end token", "stop"},
    [IN_THINKING] = {"an end token", "thinking"}, [LIMIT_REACHED] = {"-n", "length"},
    [CONTEXT_ENDED] = {"a full context (-c)", "context"},
    [REPEATS] = {"repeating itself (-e 1.1 helps, -n -1 lets it go on)", "loop"}};
_Static_assert(sizeof(endings) == INTERRUPTED * sizeof(*endings), "all before it stand here");

// An id is a repeat if the 8 ids that end with it came at least 3 times before. It adds 1 to a
// count, any other id takes off 3, and at 256 the answer ends (in thinking, only that): the counts
// of lists, tables and code stay far below. The first </think> begins the watch anew.
static bool watch_repeats(const Tokenizer *tok, Text *text) {
    enum { LENGTH = 8, TIMES = 3, MOST = 256 };
    Slot *slot = text->slot;
    const size_t n = text->ids.n;
    const int *p = text->ids.p, id = p[n - 1];
    int times = 0;
    for (size_t end = n - 1; end >= slot->watched + LENGTH && times < TIMES; end--)
        times += p[end - 1] == id
            && memcmp(p + end - LENGTH, p + n - LENGTH, LENGTH * sizeof(int)) == 0;
    slot->repeats += times == TIMES ? 1 : -min_int(slot->repeats, 3);  // never below 0
    const bool first = id == tok->end_think && slot->watched == text->n_prompt;
    if (first) slot->watched = n, slot->repeats = 0;
    return slot->repeats >= MOST;
}

// Calls append_id. In a chat a text thinks from <think> on, and up to </think>: its writer follows.
static Ending add_id(const Tokenizer *tok, Text *t, int id) {
    bool *thinking = &t->slot->thinking;
    const bool stops = is_stop(tok, id), chat = t->slot->engine->mode == CHAT && !stops;
    t->slot->drawn += !stops;
    if (chat && id == tok->think) writer_thinks(t->writer, *thinking = true);
    const Ending ending = append_id(tok, t, id);
    if (chat && id == tok->end_think && *thinking) writer_thinks(t->writer, *thinking = false);
    return ending;
}

// NULL: no form, or it thinks. In turns all states are forgotten, and this text's made anew; with
// -DPLAIN only if earlier ones filled the form. The text's state is not LEFT then: the mask of the
// state before it was made within the same limits, and had the way to it.
static const uint32_t *allowed_ids(const Text *t) {
    const Slot *slot = t->slot;
    Form *f = slot->engine->form;
    if (!f || slot->thinking) return NULL;
    if ((f->takes_turns && f->turn != t) || !f->states[slot->form].mask) {
        const bool forgot = forget_states(f);
        prepare_text(slot->engine, t, forgot, true);
        if (f->full && !forgot) prepare_text(slot->engine, t, forget_states(f), true);
        f->turn = t;
    }
    return f->states[slot->form].mask;
}

// Calls add_id, and goes on in the form. It begins after after_think, where there was thinking.
static Ending add_formed(const Tokenizer *tok, Text *t, int id) {
    Slot *slot = t->slot;
    Form *f = slot->engine->form;
    const Ids *after = &slot->engine->after_think;
    const uint32_t *allowed = allowed_ids(t);  // NULL: it thinks
    slot->too_many = allowed && f->full;  // even for this text alone
    if (slot->too_many) return FAILED;
    if (allowed && !(allowed[id / 32] >> id % 32 & 1)) return FAILED;  // logits of a damaged model
    if (allowed) t->writer->trims = false;
    if (slot->form < FIRST_OTHER) slot->form_start = t->ids.n;
    Ending ending = add_id(tok, t, id);
    if (slot->thinking || !allowed) slot->form = FORM_START;
    else if (ending != COMPLETE) slot->form = state_after(f, slot->form, tok->text[id]);
    if (slot->thinking) return ending;
    for (size_t i = 0; i < after->n && !allowed && ending == GOES_ON; i++)
        ending = add_id(tok, t, after->p[i]);
    const FormState *s = &f->states[slot->form];
    return allowed && s->may_end && s->n == 1 ? COMPLETE : ending;
}

// A text that does not think has the Ending of add_id or add_formed, before given answers COMPLETE.
// Thinking is closed by budget_text if it has N ids (-r N), or goes round in circles for the first
// time. Then the answer goes on. Before given answers, whatever ends it closes it (COMPLETE): see
// next_choice.
static Ending accept_id(const Tokenizer *tok, Text *t, int id) {
    Slot *slot = t->slot;
    const Engine *e = slot->engine;
    const bool was_thinking = slot->thinking;
    if (chooses(e) && !was_thinking && id != tok->think) return COMPLETE;  // this id is dropped
    Ending ending = e->form ? add_formed(tok, t, id) : add_id(tok, t, id);
    if (!slot->thinking) return chooses(e) ? COMPLETE : ending;
    slot->thought += was_thinking && ending != COMPLETE;  // <think> and a stop id do not count
    const bool spent = e->options.think > 1 && slot->thought >= e->options.think;  // -r N
    const bool closes = ending == GOES_ON ? spent
        : chooses(e) || (ending == REPEATS && slot->closed_by != REPEATS);  // else the answer ends
    if (!closes) return ending == COMPLETE ? IN_THINKING : ending;
    slot->closed_by = ending;  // GOES_ON: BY_BUDGET
    if (chooses(e)) return COMPLETE;
    if (ending == REPEATS) slot->repeats = 0;
    ending = GOES_ON;
    for (size_t i = 0; i < e->budget_text.n && ending == GOES_ON; i++)
        ending = add_id(tok, t, e->budget_text.p[i]);
    return ending;
}

// ------------------------------------------------------------------------------------------------
// Given answers (-o): how likely is it that the answer begins with each of several TEXTs (with -o
// @NAME a text's own)? First the thinking is drawn, if any. Then the last logits give the first id
// of each TEXT its nll. Then each TEXT of more ids takes the place of the one before: so the prompt
// and the thinking do not run again. Where the ids of one TEXT begin another's, the answer also has
// to end after the shorter one. So at most one (of different ids) comes true: probabilities add up.

static double logit_of(const Tokenizer *tok, const float *logits, int id) {
    double max = -INFINITY, sum = 0;
    if (id != ANY_STOP) return logits[id];
    for (size_t i = 0; i < tok->stop.n; i++) max = fmax(max, logits[tok->stop.p[i]]);
    for (size_t i = 0; i < tok->stop.n; i++) sum += exp(logits[tok->stop.p[i]] - max);
    return max + log(sum);  // the probabilities of several ids add up
}

static void add_choice(Choices *all, Bytes text) {
    all->p = grow(all->p, &all->cap, all->n, 1, sizeof(Choice));
    all->p[all->n] = (Choice){0};
    buffer_add(&all->p[all->n++].text, text);
}

// Splits -o into the given answers of all texts, or ends the program if they can't be such.
static void split_answers(Engine *e) {
    const char *text = e->options.member ? NULL : e->options.answers;
    for (size_t n; text; text = text[n] ? text + n + 1 : NULL) {
        n = strcspn(text, "|");
        const Bytes choice = {(const uint8_t *)text, n};
        if (n == 0) die_usage("-o: an empty answer, expected TEXT|TEXT...");
        if (find_bad_byte(choice) < n) die_usage("-o: bytes that are no text, expected UTF-8");
        for (int i = 0; i < e->next.n; i++)
            if (bytes_equal(bytes_of(&e->next.p[i].text), choice))
                die_usage("-o: the answer %.*s twice, expected different ones", (int)n, text);
        add_choice(&e->next, choice);
    }
    if (e->next.n == 1)
        die_usage("-o: one answer, expected several, in quotes: \"TEXT|TEXT\" (output: > FILE)");
}

// The order of ids: one that begins others comes before them. Then that of texts, then of places
static int compare_choices(const void *a, const void *b) {
    const Choice *x = *(Choice *const *)a, *y = *(Choice *const *)b;
    int order = memcmp(x->ids.p, y->ids.p, min_size(x->ids.n, y->ids.n) * sizeof(int));
    if (order == 0) order = (x->ids.n > y->ids.n) - (x->ids.n < y->ids.n);
    if (order == 0) order = (x->text.n > y->text.n) - (x->text.n < y->text.n);
    if (order == 0) order = memcmp(x->text.p, y->text.p, x->text.n);
    return order ? order : (x > y) - (x < y);
}

// Finds the given answers that begin another one, or are as another one.
static void compare_all(Choices *all) {
    Choice **sorted = grow(NULL, &(size_t){0}, 0, all->n, sizeof(*sorted));
    for (int i = 0; i < all->n; i++) sorted[i] = &all->p[i];
    qsort(sorted, all->n, sizeof(*sorted), compare_choices);
    for (int i = all->n - 2; i >= 0; i--) {  // what c begins, if anything, comes next
        Choice *c = sorted[i], *next = sorted[i + 1];
        const size_t n = c->ids.n;
        if (next->ids.n < n || memcmp(c->ids.p, next->ids.p, n * sizeof(int)) != 0) continue;
        next->same_ids = next->n_tokens == c->n_tokens;
        next->same_text = next->same_ids && bytes_equal(bytes_of(&c->text), bytes_of(&next->text));
        if (next->ids.n > n) ids_add(&c->ids, ANY_STOP);  // longer, or equal with an ANY_STOP
    }
    free(sorted);
}

// Encodes the given answers of the next text: with -m generate -o @NAME each together with its
// prompt, else `prompt` is empty. Joined to its prompt, a TEXT may change the prompt's last ids:
// then the ids of all TEXTs begin at the first one that any changes. As in lm-evaluation-harness,
// those from place e->prompt.n on are the TEXT's own. Returns what is wrong, or NULL.
static const char *encode_choices(Engine *e, Bytes prompt) {
    const Tokenizer *tok = &e->tokenizer;
    const Ids *ids = &e->prompt;
    Choices *all = &e->next;
    Choice *const end = all->p + all->n;
    // ids before what is encoded with a TEXT: the prefix or, where `prompt` is blank, all
    const size_t fixed = strip_end(tok, prompt).n ? tok->prefix.n : ids->n;
    const size_t closing = e->may_think ? e->budget_text.n  // ask adds these; a last id never runs
                           : e->mode == CHAT && e->after_think.n ? e->after_think.n - 1 : 0;
    const size_t context = e->model.context;
    size_t same = ids->n;  // so many first ids of e->prompt no TEXT changes
    Buffer text = {0};
    if (prompt.n && (prompt.n + 40.0) * all->n > 25e6)
        return say("too long, expected less: each answer encodes its %zu bytes anew", prompt.n);
    buffer_add(&text, prompt);
    for (Choice *c = all->p; c < end && !interrupted; c++) {
        text.n = prompt.n;
        buffer_add(&text, bytes_of(&c->text));
        encode_part(tok, bytes_of(&text), e->mode == GENERATE, &c->ids);
        for (size_t i = fixed; i < same; i++)
            if (i - fixed == c->ids.n || c->ids.p[i - fixed] != ids->p[i]) same = i;
    }
    free(text.p);
    if (interrupted) return NULL;
    all->before = ids->n - same;
    for (Choice *c = all->p; c < end; c++) {
        const Ids whole = c->ids;
        c->ids = (Ids){0};
        for (size_t i = same - fixed; i < whole.n; i++) ids_add(&c->ids, whole.p[i]);
        free(whole.p);
        c->n_tokens = c->ids.n - min_size(c->ids.n, all->before);
        if (c->n_tokens + closing > e->reserve) e->reserve = c->n_tokens + closing;
    }
    compare_all(all);
    for (Choice *c = all->p; c < end; c++) {
        const char *wrong = c->n_tokens > 0 ? NULL : "adds no token to the prompt";
        for (size_t i = all->before; i < c->ids.n; i++)
            if (is_stop(tok, c->ids.p[i])) wrong = "has a token that ends answers, expected none";
        if (ids->n && ids->n + c->n_tokens + closing > context)  // without ids: see wrong_length
            wrong = say("too long, expected to fit into the context (-c) after its prompt: %zu "
                        "tokens, found %zu", context - min_size(context, ids->n + closing),
                        c->n_tokens);
        if (c->same_ids && e->kind == CHOICES) wrong = "has the same tokens as another answer";
        if (wrong) return say("%.*s: %s", (int)min_size(c->text.n, 200), c->text.p, wrong);
    }
    return NULL;
}

// Closes any thinking, in spite of -n. The last id runs (again): its logits score all first ids.
static void ask(Engine *e, Text *t) {
    const bool closed = e->mode == CHAT && t->ids.p[t->ids.n - 1] == e->tokenizer.end_think;
    const Ids *ids = t->slot->thinking ? &e->budget_text : closed ? &e->after_think : NULL;
    t->writer->trims |= closed;  // the newlines are no answer's
    for (size_t i = 0; ids && i < ids->n; i++) add_id(&e->tokenizer, t, ids->p[i]);
    go_back(e, t, t->ids.n - 1);
    t->slot->next_turn_at = t->ids.n - t->slot->own.choices.before;  // all TEXTs begin so
    t->slot->choice = FIRST_IDS;
    t->asks = true;
    t->n_prompt = t->ids.n;  // what all TEXTs follow
    t->context = e->model.context;
}

// Sets each TEXT's nll to its first id's: of no use if before > 0. FAILED: one is not finite.
static Ending score_first_ids(const Tokenizer *tok, Text *t, float *logits) {
    const Choices *all = &t->slot->own.choices;
    double *nll = t->slot->own.nll;
    for (int i = 0; i < all->n; i++) nll[i] = -logits[all->p[i].ids.p[0]];
    const double sum = log_sum_exp(logits, tok->vocab_size);
    Ending ending = COMPLETE;
    for (int i = 0; i < all->n; i++)
        if (!isfinite(nll[i] += sum)) ending = FAILED;
    return ending;
}

// Starts the asker's next TEXT of more than one id. Returns false if there is none.
static bool start_choice(Engine *e, Text *t) {
    Slot *slot = t->slot, *asker = slot->asker;
    const Choices *all = &asker->own.choices;
    while ((slot->choice = asker->n_begun) < all->n) {
        const Choice *c = &all->p[asker->n_begun++];
        const size_t from = t->n_prompt - all->before;  // where c->ids begin in t->ids
        asker->drawn += c->n_tokens;
        t->nll = all->before ? 0 : asker->own.nll[slot->choice];
        if (c->ids.n == 1) continue;  // it is known
        t->target = t->n_prompt + (all->before == 0);
        go_back(e, t, from);
        t->ids.n = from;
        for (size_t i = 0; i < c->ids.n; i++) ids_add(&t->ids, c->ids.p[i]);
        return true;
    }
    return false;
}

// Lets other places score given answers of a text that is alone: so they run in one pass.
static void add_helpers(Engine *e, const Text *t) {
    Slot *asker = t->slot;
    const Ids prompt = {t->ids.p, t->n_prompt, 0};
    while (asker->n_begun < asker->own.choices.n && e->n_texts < e->most_texts) {
        Text *other = add_text(e, &prompt, 0, true);
        other->slot->asker = asker;
        if (!start_choice(e, other)) remove_text(e, other);
    }
}

// Goes on after what the text waited for. Returns false after the last TEXT, or if one fails.
static bool next_choice(Engine *e, Text *t) {
    Slot *slot = t->slot;
    const int choice = slot->choice;
    if (t->ending == FAILED) return false;
    if (choice == THINKS) return ask(e, t), true;
    if (choice >= 0) slot->asker->own.nll[choice] = t->nll;
    const bool more = start_choice(e, t);
    if (choice == FIRST_IDS && !e->options.list) add_helpers(e, t);
    return more;
}

// Returns whether thinking is drawn before given answers.
static bool thinks_first(const Engine *e) { return e->may_think && e->options.n != 0; }

// Returns how many ids a prompt and its thinking may have: then given answers still fit.
static size_t room_of(const Engine *e) {
    return e->model.context - min_size(e->model.context, e->reserve);
}

// Begins the life of a text with -o: it thinks first, if it may and has room, or is asked at once.
static void start_asking(Engine *e, Text *t, bool goes_on) {
    t->context = room_of(e) - 1;  // append_id adds an id, then asks for room
    t->slot->choice = THINKS;
    if (goes_on || !thinks_first(e) || t->ids.n > t->context) ask(e, t);
}

// Returns the likeliest TEXT's number, best. exp(nll[best] - nll[i]) / *sum is the share of TEXT i,
// *mass the probability of all. Integers are added, of 2^-60: so the TEXTs' order changes no bit.
static int find_likeliest(const Slot *slot, double *sum, double *mass) {
    const double *nll = slot->own.nll;
    const Choices *all = &slot->own.choices;
    __uint128_t units = 0;
    int best = 0;
    for (int i = 1; i < all->n; i++) best = nll[i] < nll[best] ? i : best;
    for (int i = 0; i < all->n; i++)
        if (!all->p[i].same_ids) units += (uint64_t)ldexp(exp(nll[best] - nll[i]), 60);
    *sum = ldexp((double)units, -60);
    *mass = exp(-nll[best]) * *sum;
    return best;
}

// ------------------------------------------------------------------------------------------------
// Checks and notices: what is wrong with a prompt, and what is worth knowing before it runs. A
// wrong prompt ends the program, but in a dialogue only its turn, and in a list only its line.
// give_notices waits for the last check: so an error message mostly stands alone.

// Returns whether ids are drawn: of answers, or with -o of thinking before them (unless -n is 0).
static bool draws_ids(const Engine *e) {
    return modes[e->mode].has_answers && (!chooses(e) || thinks_first(e));
}

// Returns what is wrong with a prompt of n ids, or with `more` of n or more; NULL if nothing is.
static const char *wrong_length(const Engine *e, size_t n, bool more) {
    const size_t context = e->model.context, all = e->model.config.max_seq_len;
    const size_t least = more ? 0 : modes[e->mode].least;
    const bool whole = e->mode != TOKENIZE && e->mode != PERPLEXITY;  // must it fit?
    const size_t most = whole ? room_of(e) : INT_MAX;
    if (most == 0)  // so no text fits
        return say("-o: its answers need %zu tokens, expected fewer than the context, %zu (-c)",
                   e->reserve, context);
    char hint[64] = "split the text, or export.py --yarn";
    if (n <= all && context < all) snprintf(hint, sizeof(hint), "-c, up to %zu", all);
    if (n < least) return say("too short, expected %zu or more tokens, found %zu", least, n);
    return n <= most ? NULL : say("too long, expected at most %zu tokens (%s), found %zu%s", most,
                                  hint, n, more ? " or more" : "");
}

// Returns what is wrong with so many bytes if encoding them needs more than half of the memory.
static const char *wrong_memory(size_t size) {
    const double takes = 56e-6 * size;  // MB
    if (takes <= 50 || takes <= memory_size() / 2e6) return NULL;
    return say("too long, expected at most %.0f MB, because encoding takes 56 times as much, "
               "found %.0f MB", memory_size() / 112e6, size / 1e6);
}

// Returns what is wrong with a text of so many bytes before it is encoded, or NULL.
static const char *wrong_size(const Engine *e, size_t size) {
    const size_t n = size / 4 / e->tokenizer.tables->longest;  // ids at least: NFC may quarter it
    const char *error = wrong_length(e, n, true);
    if (size == 0 && (e->mode == CHAT || e->mode == EMBED)) return "empty, expected a text";
    return error ? error : wrong_memory(size);
}

// Prepares a notice of the first text that is not UTF-8, or has a NUL. Its first line is `line`.
static void check_utf8(Engine *e, const char *name, size_t line, Bytes text) {
    const size_t bad = find_bad_byte(text);
    const bool nul = bad < text.n && memchr(text.p + bad, 0, min_size(text.n - bad, 2));
    if (bad == text.n || e->not_utf8.n) return;
    for (size_t i = 0; i < bad; i++) line += text.p[i] == '\n';
    buffer_print(&e->not_utf8, "%.300s: line %zu %s, taken as it is; if it is %s (a guess): "
                 "iconv -f %s -t UTF-8", name, line, nul ? "has a NUL byte" : "is not UTF-8",
                 nul ? "UTF-16" : "Latin-1", nul ? "UTF-16LE" : "LATIN1");
}

// -v: where the model came from, the cache, the sampling, the chat template's own system prompt
static void show_settings(const Engine *e) {
    const ChatFormat *f = &e->tokenizer.chat;
    const Sampler *s = &e->sampling;
    const Bytes from = e->tokenizer.tables->from, open = f->open[SYSTEM], close = f->close[SYSTEM];
    Bytes text = e->mode == CHAT && !e->options.system ? f->no_system[e->switched_on] : (Bytes){0};
    if (text.n > open.n + close.n && memcmp(text.p, open.p, open.n) == 0)
        text = (Bytes){text.p + open.n, text.n - open.n - close.n};
    if (from.n) report("model: %.*s", (int)min_size(from.n, 1000), from.p);
    if (e->mode != TOKENIZE)
        report("cache: -c %d -C %d", e->model.context, e->model.config.cache_bits);
    if (draws_ids(e))
        report("sampling: -t %g -p %g -k %d -a %g -e %g", s->temperature, s->top_p, s->top_k,
               s->presence, s->repetition);
    if (text.n)
        report("system prompt of the chat template: %.*s", (int)min_size(text.n, 4000), text.p);
}

// Says once of a TEXT, and once of a raw prompt, that it has a blank where most have none.
static void check_blanks(Engine *e) {
    const Tokenizer *tok = &e->tokenizer;
    const Ids *ids = &e->prompt;
    const bool raw = e->mode == GENERATE, given = e->kind == CHOICES;
    const Bytes last = raw && ids->n ? tok->text[ids->p[ids->n - 1]] : (Bytes){0};
    for (int i = 0; i < e->next.n; i++) {
        const Bytes text = bytes_of(&e->next.p[i].text);
        if (strip_end(tok, text).n < text.n || (!raw && char_at(tok, text, 0).class == SPACE))
            warn_once(e->gave_blank_choice, "-o: \"%.*s\" has a blank at an end, which counts",
                      (int)text.n, text.p);
    }
    if (strip_end(tok, last).n < last.n && (given || last.p[last.n - 1] != '\n'))
        warn_once(e->gave_blank_prompt, "prompt: ends in a blank, expected %s", given
                  ? "it in -o instead, at each TEXT's start" : "none: most tokens begin with one");
}

// Says what in an expression of -g is most likely not meant.
static void check_form(const char *text) {
    const size_t n = strlen(text);
    const bool plain = !strpbrk(text, "[(");
    const bool grammar = strstr(text, "::=");
    if (!grammar && !strpbrk(text, "[(|.?*+{\\"))
        notice("-g: each answer is this text alone; ways are yes|no, others in RECIPES.md");
    const char *last = strrchr(text, *text), *set = strchr(text, '['), *at = set ? set + 1 : "";
    const size_t flags = *text == '/' ? strspn(last + 1, "gimsu") : 0;  // as in /yes|no/i
    if (n > 1 && strchr("/'", *text) && last > text && flags < 3 && !last[1 + flags])
        notice("-g: %c at both ends is a sign of the answer", *text);
    while (isalpha((uint8_t)*at)) at++;
    if (*at == '|' && at > set + 1 && (set == text || set[-1] != '\\'))
        notice("-g: | in [...] is a sign of the answer; (yes|no) makes ways");
    if (!strchr(text, '"') && (strstr(text, "\\\\d") || strstr(text, "\\\\w")))
        notice("-g: \\\\ is a backslash in the answer; \\d is a digit, \\w a letter");
    if (plain && (strstr(text, " |") || strstr(text, "| ")))
        notice("-g: a blank beside | is a sign of the answer");
    if (plain && strstr(text, "\\|"))
        warn("-g: \\( \\| \\) are these signs in the answer; ( | ) make groups and ways");
    if (grammar)
        warn("-g: a grammar (::=), taken as text; expected a regular expression, yes|no");
}

// Says which options have no effect here, and which texts were hardly meant as they are.
static void check_options(Engine *e) {
    const Options *o = &e->options;
    if (draws_ids(e) && o->temperature > 2)
        notice("-t: %g draws nearly at random, expected 2 or less (-j: threads)", o->temperature);
    if (draws_ids(e) && o->given['s'] && o->seed == ULLONG_MAX)
        notice("-s: -1 is a seed as others are; without -s each run draws one");
    if (draws_ids(e) && o->repetition >= 0 && (o->repetition < 0.8f || o->repetition > 2))
        notice("-e: %g breaks the text, expected 1 (off) to 2, mostly 1.05 to 1.2", o->repetition);
    for (const Option *option = options; option < options + N_OPTIONS; option++) {
        const char letter = option->letter, *const place = (const char *)o + option->place;
        const char *text = strchr("ixyog", letter) ? *(const char *const *)place : NULL;
        if (o->given[(uint8_t)letter] && strchr(modes[e->mode].idle, letter))
            notice("-%c: no effect with -m %s", letter, modes[e->mode].name);
        const char *const name = text && *text == '@' ? text + 1 : text;
        const char *const end = text ? strrchr(text, '.') : NULL;
        const bool schema = letter == 'g' && end && !strcmp(end, ".json");
        if (schema || (text && strchr("iyg", letter) && S_ISREG(file_mode(name))))
            warn("-%c: the name of a file, taken as text; %s reads it", letter, letter == 'i' ? "-f"
                 : schema ? "-g \"$(export.py --form FILE)\"" : say("-%c \"$(cat FILE)\"", letter));
        else if (name != text && strchr("iy", letter) && !strpbrk(name, " \n"))
            notice("-%c: @ is a sign of the text; no such file", letter);
        if (text && letter == 'i' && !strcmp(text, "-")) warn("-i: - is taken as text, not stdin");
        const char *odd = !text ? NULL : strchr("(^/", *text) ? text : strstr(text, "\\|");
        if (odd && letter == 'o')
            notice("-o: %c is a sign of the answer; -g takes an expression", *odd);
        if (text && letter == 'g') check_form(text);
        if (text && letter != 'g' && strstr(text, "\\n") && !strchr(text, '\n'))
            warn_once(e->gave_escape, "-%c: \\n is no newline here, $'...' makes newlines", letter);
    }
}

// Writes what stderr says before the model runs: the prompt's ids, and the first time the notices.
static void give_notices(Engine *e) {
    const Options *o = &e->options;
    const Tables *tables = e->tokenizer.tables;
    const bool chat = e->mode == CHAT, piped = o->file ? !strcmp(o->file, "-") : !o->text;
    if (o->given['v'] && e->mode != TOKENIZE && e->prompt.n) {
        fputs("prompt ids:", stderr);
        for (size_t i = 0; i < e->prompt.n; i++) fprintf(stderr, " %d", e->prompt.p[i]);
        fputc('\n', stderr);
    }
    if (e->not_utf8.n)
        warn_once(e->gave_not_utf8, "%.*s", (int)e->not_utf8.n, (char *)e->not_utf8.p);
    check_blanks(e);
    if (e->gave_notices) return;
    e->gave_notices = true;
    if (o->given['v']) show_settings(e);
    if (!tables->has_classes || tables->lacks_nfc)
        notice("tokenizer: %s; export the model again", tables->has_classes
               ? "an older file, exact for texts in NFC" : "no Unicode data, exact on ASCII only");
    if (chat && tables->guessed_chat)
        notice("chat template: more than fixed strings, ChatML is in its place");
    if (o->mode < 0 && !chat)
        notice("mode: %s, as this is no chat model; -m chat overrides it", modes[e->mode].name);
    if (e->mode == EMBED && tables->has_classes && tables->mode != EMBED)
        warn("-m embed: poor vectors, this is no embedding model; expected one");
    if (chat && o->think >= 0 && !(e->can_switch || (o->think > 1 && e->may_think)))
        notice("-r: no effect, this model's thinking can't be switched");
    check_options(e);
    if (e->mode == PERPLEXITY && !o->list && e->prompt.n > (size_t)e->model.context)
        notice("text: %zu tokens are scored in pieces of %d (-c)", e->prompt.n, e->model.context);
    if (chat && (e->switched_on || e->thinks) && e->sampling.temperature == 0)
        notice("-t 0: greedy thinking tends to repeat without end, Qwen advises 0.6");
    if (o->threads > 2 * cpu_count())
        notice("-j: more threads than cores take longer; without -j each core has one");
    if (!piped && !o->list && stdin_has_data())
        warn("stdin: has data that was not read; -f - would add all of it, -l - by line");
}

// ------------------------------------------------------------------------------------------------
// Results: an answer, ids, a score, a vector or given answers, as a line or as members of an object

// JSON's escapes, each of a backslash and one of these, and what they mean. / need not be escaped.
static const char escapes[] = "\"\\bfnrt/", escaped[] = "\"\\\b\f\n\r\t/";

// Appends a text as a JSON string. What is not UTF-8 is \ufffd: once, or for each byte.
static void buffer_add_json(Buffer *b, Bytes text, bool each_byte) {
    buffer_add(b, bytes("\""));
    for (size_t at = 0; at < text.n;) {
        const Char c = each_byte ? code_point_at(text, at) : decode_at(text, at);
        const char *at_escape = c.c && c.c < 128 && c.c != '/' ? strchr(escaped, c.c) : NULL;
        if (c.c >= BAD_BYTE) buffer_print(b, "\\ufffd");
        else if (at_escape) buffer_print(b, "\\%c", escapes[at_escape - escaped]);
        else if (is_control(c.c)) buffer_print(b, "\\u%04x", c.c);
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

#ifndef SCORE_DIGITS  // tests compare all that a double has
#define SCORE_DIGITS 9
#define NLL_DIGITS 6
#endif

// Appends the likeliest given answer, then the other members, which have these names.
static void buffer_add_choices(Buffer *out, const Slot *slot, const char *const *names) {
    const Choices *all = &slot->own.choices;
    const double *nll = slot->own.nll;
    double sum, mass;
    const int best = find_likeliest(slot, &sum, &mass);
    buffer_add_json(out, bytes_of(&all->p[best].text), false);
    for (int i = 0; i < all->n; i++) {
        if (all->p[i].same_text) continue;  // never the first
        buffer_add(out, bytes(i ? "," : say(",\"%s\":{", names[1])));
        buffer_add_json(out, bytes_of(&all->p[i].text), false);
        buffer_print(out, ":%.*g", SCORE_DIGITS, exp(nll[best] - nll[i]) / sum);
    }
    buffer_print(out, "},\"%s\":%.*g", names[2], SCORE_DIGITS, mass);
    if (slot->engine->kind == CHOICES) return;
    for (int i = 0; i < all->n; i++)
        buffer_print(out, "%s%.*g", i ? "," : say(",\"%s\":[", names[3]), SCORE_DIGITS, nll[i]);
    for (int i = 0; i < all->n; i++)
        buffer_print(out, "%s%zu", i ? "," : say("],\"%s\":[", names[4]), all->p[i].n_tokens);
    buffer_add(out, bytes("]"));
}

static void buffer_add_score(Buffer *out, const Text *t, const char *const *names, bool object) {
    const size_t n = t->slot->own.prompt.n - 1;
    const double nll = t->nll / n, ppl = exp(nll), most = object ? DBL_MAX : INFINITY;  // of JSON
    if (!object) buffer_print(out, "%s ", names[0]);
    buffer_print(out, object ? "%zu,\"%s\":%.*f,\"%s\":%.4f" : "%zu %s %.*f %s %.4f", n,
                 names[1], NLL_DIGITS, nll, names[2], fmin(ppl, most));
}

// Ends a line with a text's result or error: members if it is an object, or of given answers.
static void add_result(Buffer *line, const Engine *e, const Text *t, const char *error) {
    const int kind = e->kind;
    const char *const *names = modes[kind].members;
    if (kind == CHOICES && line->n == 0 && !error) buffer_add(line, bytes("{"));
    const bool object = line->n > 0;
    if (object) buffer_print(line, "\"%s\":", names[0]);
    if (error) buffer_add(line, bytes(object ? "null,\"" REASON "\":" : "null"));
    else if (chooses(e)) buffer_add_choices(line, t->slot, names);
    else if (kind == EMBED) buffer_add(line, bytes_of(&t->slot->own.out));
    else if (kind == TOKENIZE) buffer_add_ids(line, &e->prompt, object);
    else if (kind == PERPLEXITY) buffer_add_score(line, t, names, object);
    else buffer_add_json(line, bytes_of(&t->slot->own.out), false);
    if (object && error) buffer_add_json(line, bytes(error), false);
    else if (object && modes[kind].has_answers && !chooses(e))
        buffer_print(line, ",\"%s\":\"%s\"", names[1], endings[t->ending].name);
    buffer_add(line, bytes(object ? "}\n" : "\n"));
}

static void add_to_vector(Text *t, double number) {
    Buffer *out = &t->slot->own.out;
    out->n -= out->n > 0;  // "]"
    buffer_print(out, "%s%.9g]", out->n ? ", " : "[", number);
}

#define UNLIKELY \
    "choices: mass below 0.1 in %zu of %zu texts: the model would answer something else"

// Writes the likeliest TEXT, and to stderr how likely each one is.
static void write_choices(const Text *t) {
    const Choices *all = &t->slot->own.choices;
    const double *nll = t->slot->own.nll;
    double sum, mass;
    const int best = find_likeliest(t->slot, &sum, &mass);
    Buffer line = {0};
    buffer_add(&t->writer->held, bytes_of(&all->p[best].text));
    writer_end(t->writer);
    for (int i = 0; i < all->n; i++) {
        buffer_add(&line, bytes(i ? ", " : "qwen3: choices: "));
        add_printable(&line, bytes_of(&all->p[i].text), false);
        buffer_print(&line, " %.6f", exp(nll[best] - nll[i]) / sum);
    }
    buffer_print(&line, " (%.6f of all answers)\n", mass);
    if (!quiet) fwrite(line.p, 1, line.n, stderr);
    if (mass < 0.1) warn(UNLIKELY, (size_t)1, (size_t)1);
    free(line.p);
}

// ------------------------------------------------------------------------------------------------
// An answer: a request runs alone. The ids that it draws become a message, and stderr gets numbers.

static Message *conversation_add(Conversation *talk, int role, Bytes text) {
    talk->p = grow(talk->p, &talk->cap, talk->n, 1, sizeof(Message));
    talk->p[talk->n] = (Message){.role = role};
    buffer_add(&talk->p[talk->n].text, text);
    return &talk->p[talk->n++];
}

// Removes messages first .. end - 1.
static void conversation_drop(Conversation *talk, size_t first, size_t end) {
    for (size_t i = first; i < end; i++) free(talk->p[i].text.p);
    for (size_t i = end; i < talk->n; i++) talk->p[first + i - end] = talk->p[i];
    talk->n -= end - first;
}

// Runs the prompt alone, to its end or Ctrl-C, and returns its text.
static Text *run_request(Engine *e) {
    Text *t = add_text(e, &e->prompt, e->sampling.rng, false);
    e->prompt_end = 0;
    start_texts(e);  // sets n_run to what is cached
    const size_t n = e->mode == PERPLEXITY ? e->prompt.n - 1 : t->target;  // that must run
    progress = (struct Progress){.tokens = n - t->n_run, .start = now()};
    while (e->n_texts > 0 && run_pass(e)) {
        for (int i = e->n_running - 1; i >= 0; i--) {
            Text *running = e->order[i];
            if (running->ending == FAILED) die("%s", why_failed(running));
            if (running->ending != GOES_ON) end_text(e, running);
        }
    }
    progress_end();
    if (e->n_texts > 0) t->ending = INTERRUPTED;  // others may still have scored for it
    while (e->n_texts > 0) remove_text(e, e->order[0]);
    if (e->prompt_end == 0) e->prompt_end = now();
    return t;
}

// Says how an answer or its thinking ended, if not by itself, and how fast it was.
static void report_answer(const Engine *e, const Text *t) {
    const Slot *slot = t->slot;
    const int context = e->model.context, all = e->model.config.max_seq_len;
    const size_t prompt = e->prompt.n, n = slot->drawn;
    const size_t done = t->ending == INTERRUPTED ? min_size(t->n_run, prompt) : prompt;
    const double p = done / (e->prompt_end - slot->start + 1e-9);  // tokens/s; some were there
    const double g = n / (now() - e->prompt_end + 1e-9);
    const bool may_grow = t->ending == CONTEXT_ENDED && context < all;
    if (slot->closed_by != NOT_CLOSED)
        notice("answer: thinking ended by %s after %d tokens", endings[slot->closed_by].by,
               slot->thought);
    if (t->ending > COMPLETE && t->ending < INTERRUPTED)
        warn("answer: ended%s by %s after %zu tokens%s",
             slot->thinking ? " inside its thinking" : "", endings[t->ending].by, n,
             may_grow ? say("; -c allows up to %d", all) : "");
    if (!quiet)
        fprintf(stderr, "prompt %zu tokens at %.*f/s (%zu cached), answer %zu at %.*f/s%s\n", done,
                RATE(p), slot->cached, n, RATE(g),
                draws_ids(e) ? say(", seed %llu", e->options.seed) : "");
}

// Writes the prompt's result in a mode without answers. With -v each id has a line, and its text.
static void write_result(Engine *e) {
    const Ids *ids = &e->prompt;
    const bool tokenize = e->mode == TOKENIZE, by_line = tokenize && e->options.given['v'];
    Buffer lines = {0};
    for (size_t i = 0; by_line && i < ids->n; i++) {
        buffer_print(&lines, "%d ", ids->p[i]);
        buffer_add_json(&lines, e->tokenizer.text[ids->p[i]], true);
        buffer_add(&lines, bytes("\n"));
    }
    const Text *t = tokenize ? NULL : run_request(e);
    if (t ? t->ending == COMPLETE : !by_line) add_result(&lines, e, t, NULL);
    write_results(bytes_of(&lines));
    free(lines.p);
}

// Answers the prompt, as the conversation's next message. Returns false if Ctrl-C came first.
static bool respond(Engine *e) {
    const Tokenizer *tok = &e->tokenizer;
    Buffer *answer = &conversation_add(&e->conversation, ASSISTANT, (Bytes){0})->text;
    const Text *t = run_request(e);
    e->sampling.rng = t->sampler.rng;
    for (size_t i = t->n_prompt; i < t->ids.n && !chooses(e); i++) {
        const int id = t->ids.p[i];  // of </think> it has the bytes, even of a SPECIAL one
        buffer_add(answer, id == tok->end_think ? tok->text[id] : text_of(tok, id));
    }
    answer->n -= t->writer->cut;  // -x TEXT: was not written
    t->writer->cut = 0;
    if (chooses(e) && t->ending == COMPLETE) write_choices(t);
    else writer_end(t->writer);
    report_answer(e, t);
    return t->ending != INTERRUPTED || answer->n > 0;
}

// ------------------------------------------------------------------------------------------------
// Turns: a question is added, the conversation rendered, and the answer added; or neither stays.

// Returns the length of an answer's thinking: to the last `strip`, even a quoted one, and `trim`.
static size_t thinking_length(const Tables *tables, Bytes text) {
    const Bytes trim = tables->trim;
    size_t n = find_last(text, tables->strip);
    while (n > 0 && n < text.n && trim.n && memchr(trim.p, text.p[n], trim.n)) n++;
    return n;
}

static Bytes content_of(const Tokenizer *tok, const Conversation *talk, size_t i) {
    const Bytes whole = bytes_of(&talk->p[i].text);
    const Bytes text = tok->tables->strips ? strip(tok, whole, true) : whole;
    const bool earlier = talk->p[i].role == ASSISTANT && i + 1 < talk->n;  // else it goes on
    const size_t cut = earlier ? thinking_length(tok->tables, text) : 0;
    const Bytes content = bytes_from(text, cut);
    return cut && tok->tables->keeps ? strip(tok, content, true) : content;
}

// Encodes a conversation, as render does, or the only message of another mode. A raw answer needs
// at least one id before it. (The blanks before a text's own given answers are encoded with these.)
static void encode_prompt(Engine *e, const Conversation *talk, size_t first) {
    const Tokenizer *tok = &e->tokenizer;
    const Bytes text = bytes_of(&talk->p[0].text);
    const bool own = e->mode == GENERATE && e->kind == OWN_CHOICES;  // they precede a suffix
    Ids *ids = &e->prompt;
    ids->n = 0;
    if (e->mode == CHAT) render(tok, talk, first, e->switched_on, ids);
    else encode_raw(tok, own ? strip_end(tok, text) : text, ids);
    if (own) ids->n -= tok->suffix.n;
    if (e->mode == GENERATE && ids->n == 0) ids_add(ids, tok->end_of_text);
}

// Answers the last message; with `again` the one before, anew: this takes the old answer's place.
// Until an answer has `room` or only the question is left, the older half of turns is forgotten.
// Returns false, and forgets nothing, if the question is too long or Ctrl-C comes before an answer.
static bool answer_last(Engine *e, bool again) {
    Conversation *talk = &e->conversation;
    const Conversation asked = {talk->p, talk->n - again, 0};  // up to the question, until respond
    const size_t context = e->model.context, system = talk->p[0].role == SYSTEM;
    const size_t room = min_size(e->options.n, min_size(context / 8, 1024));  // n < 0: SIZE_MAX
    const char *error = wrong_size(e, asked.p[asked.n - 1].text.n);  // of the question
    size_t first = system;
    for (; !error; first += ((asked.n - first) / 2 + 1) / 2 * 2) {  // half the turns, of 2 messages
        encode_prompt(e, &asked, first);
        if (e->prompt.n + room <= context || first == asked.n - 1 || interrupted) break;
    }
    if (!error && !interrupted) error = wrong_length(e, e->prompt.n, false);
    if (error) report("prompt: %s", error);
    if (error && !e->dialogue) exit(EXIT_FAILURE);
    if (error || interrupted) return false;
    if (first > system)
        notice("context: full (%zu tokens), forgotten turns: %zu of %zu%s", context,
               (first - system) / 2, (asked.n - system + 1) / 2,
               context < (size_t)e->model.config.max_seq_len ? "; -c keeps more" : "");
    give_notices(e);
    if (!modes[e->mode].has_answers) return write_result(e), true;
    if (!respond(e)) return conversation_drop(talk, talk->n - 1, talk->n), false;
    if (again) conversation_drop(talk, talk->n - 2, talk->n - 1);
    conversation_drop(talk, system, first);
    return true;
}

// Adds what stands before a message's content. If the format keeps earlier answers' thoughts, these
// stand in the block that is empty otherwise, after "<think>\n", without blanks at their ends.
static void encode_open(Encoder *enc, const Conversation *talk, size_t i, bool think) {
    const Tables *tables = enc->tok->tables;
    const Bytes whole = bytes_of(&talk->p[i].text), tag = bytes("<think>");
    const int role = talk->p[i].role;
    const bool instructs = role == SYSTEM && think && tables->system_to_think.p;
    Bytes open = instructs ? tables->system_to_think : enc->tok->chat.open[role];
    const size_t end = find_last(whole, tables->strip), at = find_last(open, bytes("<think>\n"));
    if (role == ASSISTANT && tables->keeps && end && at) {
        Bytes thought = strip(enc->tok, (Bytes){whole.p, end - tables->strip.n}, true);
        if (thought.n >= tag.n && !memcmp(thought.p, tag.p, tag.n))
            thought = strip(enc->tok, bytes_from(thought, tag.n), true);
        encode_marked(enc, (Bytes){open.p, at});
        encode_message(enc, thought, ASSISTANT);
        open = bytes_from(open, at);
    }
    encode_marked(enc, open);
}

// Adds an answer's beginning, as HF's continue_final_message does. A <think> block at its start
// gets its marks. Else a <think> that the format leaves open is closed at once: an empty block.
static void encode_begun(Encoder *enc, Bytes text) {
    const ChatFormat *f = &enc->tok->chat;
    const Tables *tables = enc->tok->tables;
    const Bytes think = bytes("<think>"), end_think = tables->strip;
    const Bytes open = tables->begun.p ? tables->begun : f->answer_open[0];
    const size_t opened = find_last(open, think), closed = find_last(open, bytes("</think>"));
    const size_t end = find_last(text, end_think);
    const bool thinks = end >= think.n + end_think.n && !memcmp(text.p, think.p, think.n);
    encode_marked(enc, thinks ? f->open[ASSISTANT] : open);
    if (!thinks && opened > closed) encode_marked(enc, bytes("\n</think>\n\n"));
    if (thinks) {
        encode_marked(enc, think);
        encode_message(enc, (Bytes){text.p + think.n, end - think.n - end_think.n}, ASSISTANT);
        encode_marked(enc, end_think);
    }
    text = bytes_from(text, thinks ? end : thinking_length(tables, text));
    while (!thinks && opened && text.n && *text.p == '\n') text = bytes_from(text, 1);
    encode_message(enc, text, ASSISTANT);
}

static void chat_turn(Engine *e, Bytes text) {
    Conversation *talk = &e->conversation;
    conversation_add(talk, USER, text);
    if (answer_last(e, false)) return;
    if (interrupted && e->dialogue)
        notice("chat: stopped before its answer, the message is taken back");
    conversation_drop(talk, talk->n - 1, talk->n);
    if (!e->gave_not_utf8) e->not_utf8.n = 0;  // the notice was this message's
}

// ------------------------------------------------------------------------------------------------
// Lines of input: of stdin, of a list, or of a list's output. A line keeps its newline: so a cut
// one can be told from a whole one. All texts are below 2 GB: an int can count bytes and tokens.

// Returns a text without its final newline, \n or \r\n.
static Bytes chop(Bytes text) {
    if (text.n && text.p[text.n - 1] == '\n' && --text.n && text.p[text.n - 1] == '\r') text.n--;
    return text;
}

#define UTF_16 "UTF-16, expected UTF-8 (iconv -f UTF-16 -t UTF-8; PowerShell: -Encoding utf8)"
static const struct { const char *begin, *what; } no_texts[] = {
    {"\xFF\xFE", UTF_16}, {"\xFE\xFF", UTF_16}, {"%PDF-", "a PDF, expected text: pdftotext"},
    {"PK\3\4", "a ZIP file (DOCX, XLSX, ODT), expected text: pandoc -t plain, or unzip"},
    {"\x1F\x8B", "a gzip file, expected text: gzip -dc"}, {"PAR1\x15", "Parquet, expected text"},
    {"\x89PNG", "a PNG image, expected text"}, {"\xFF\xD8\xFF", "a JPEG image, expected text"}};

// Drops U+FEFF, the byte order mark, from the start of a file. Returns NULL, or what is wrong.
static const char *drop_mark(Bytes *file) {
    for (size_t i = 0; i < sizeof(no_texts) / sizeof(*no_texts); i++) {
        const size_t n = strlen(no_texts[i].begin);
        if (file->n >= n && !memcmp(file->p, no_texts[i].begin, n)) return no_texts[i].what;
    }
    *file = bytes_from(*file, file->n > 2 && !memcmp(file->p, "\uFEFF", 3) ? 3 : 0);
    return NULL;
}

// Adds a file's text to b. Returns NULL, or what is wrong.
static const char *file_read(Buffer *b, const char *path) {
    const int fd = file_open(path, false);
    const size_t start = b->n;
    ssize_t got = fd < 0 ? -1 : 1;
    while (got > 0 && b->n < INT_MAX) got = read_more(fd, b);
    const char *error = got < 0 ? say("%s, expected a text file", strerror(errno))
                                : "too long, expected less than 2 GB";
    if (fd > STDIN_FILENO) close(fd);
    if (got != 0) return error;
    Bytes text = {b->p + start, b->n - start};
    error = drop_mark(&text);
    if (text.n) memmove(b->p + start, text.p, text.n);
    b->n = start + text.n;
    return error;
}

typedef struct {   // of a file
    int fd;
    const char *name;
    Buffer data;   // bytes that were read
    size_t end;    // of the last line
    size_t taken;  // bytes of all lines so far
    bool ended;    // the end of input has come, even if a file or a terminal has more later
    size_t most;   // bytes of a line; of a longer one, most + 3 are kept: too long after chop, too
} Lines;

// Takes the next line; an empty one if none has come and not `wait`. False: the end, or Ctrl-C.
static bool next_line(Lines *in, Bytes *line, bool wait) {
    Buffer *data = &in->data;
    const uint8_t *newline;
    size_t seen = in->end;
    *line = (Bytes){0};
    buffer_add(data, *line);  // memchr needs a data->p that is not NULL
    while (!(newline = memchr(data->p + seen, '\n', data->n - seen))) {
        if (!wait && !input_ready(in->fd)) return true;
        buffer_cut(data, in->end);
        in->end = 0;
        seen = data->n = min_size(data->n, in->most + 3);  // what is too long stays so after chop
        const ssize_t got = in->ended ? 0 : read_more(in->fd, data);
        if (got < 0 && !interrupted)
            die("%s: %s, expected a file of lines", in->name, strerror(errno));
        if (got < 0) return false;
        if ((in->ended = got == 0)) break;
    }
    const size_t start = in->end;
    in->end = newline ? (size_t)(newline - data->p) + 1 : data->n;
    *line = (Bytes){data->p + start, in->end - start};
    const char *error = in->taken ? NULL : drop_mark(line);
    if (error) die("%s: %s", in->name, error);
    in->taken += line->n;
    return line->n > 0;
}

// ------------------------------------------------------------------------------------------------
// Conversations, from stdin. In a script each line is a turn, and an error ends it. At a terminal a
// message is typed or pasted, or is a command; a wrong one ends nothing; Ctrl-C stops an answer.

// Cuts the first word off a text, and the blanks after it. The word ends at a blank, or is in
// quotes: many terminals quote the name of a file that is dropped there.
static Bytes take_word(Bytes *text) {
    const bool quoted = text->n && (*text->p == '"' || *text->p == '\'');
    Bytes word = bytes_from(*text, quoted);
    size_t n = 0;
    while (n < word.n && (quoted ? word.p[n] != *text->p : !isblank(word.p[n]))) n++;
    *text = bytes_from(word, min_size(n + quoted, word.n));
    while (text->n && isblank(*text->p)) *text = bytes_from(*text, 1);
    return (Bytes){word.p, n};
}

enum { SEND_FILE, RETRY, CLEAR, HELP, LEAVE, N_COMMANDS = 9 };  // from LEAVE on, each leaves

static const char *const commands[N_COMMANDS] = {
    "/file", "/retry", "/clear", "/help", "/bye", "/exit", "/quit", "exit", "quit"};

static const char help[] =
    "/file PATH TEXT  send TEXT and the file, or the file alone\n"
    "/retry           take the last answer back and draw another\n"
    "/clear           forget the conversation, but not the system prompt\n"
    "/help            show this\n"
    "/bye             leave; also /exit, /quit, exit, quit and Ctrl-D\n"
    "A PATH with spaces stands in quotes. A line that ends in \\ continues in the\n"
    "next. A pasted text waits for Enter. Ctrl-C stops an answer, or clears what is\n"
    "typed. For line editing and history, start the program with rlwrap before it.\n"
    "Chosen at the start: thinking (-r 1, -r 0), the system prompt (-y TEXT).\n";

// Returns the number of a command, N_COMMANDS of an unknown one, or -1 of a message; cuts its word
// off. A command is one line that begins, not in quotes, with a slash and letters, or is exit or
// quit alone. (/think is sent, and so is /no_think: its _ is no letter.)
static int take_command(Bytes *text, Bytes *word) {
    Bytes rest = *text;
    size_t letters = 1;
    int name = 0;
    *word = take_word(&rest);
    while (name < N_COMMANDS && !bytes_are(*word, commands[name])) name++;
    while (letters < word->n && isalpha(word->p[letters])) letters++;
    const bool slash = word->n > 1 && *word->p == '/' && letters == word->n;
    const bool named = slash ? !bytes_are(*word, "/think") : name < N_COMMANDS && rest.n == 0;
    if (!named || word->p != text->p || memchr(text->p, '\n', text->n)) return -1;
    *text = rest;
    return name;
}

static void run_script(Engine *e) {
    Lines in = {.fd = STDIN_FILENO, .name = "stdin", .most = INT_MAX};
    size_t n = 0;
    for (Bytes line; !interrupted && next_line(&in, &line, true);) {
        check_utf8(e, in.name, ++n, line);
        if (chop(line).n == 0)
            die("prompt: empty, expected a text (line %zu; grep . takes such lines away)", n);
        chat_turn(e, chop(line));
    }
    free(in.data.p);
}

// Reads a message from a terminal into e->input. Lines that arrive together are a paste, which
// waits for Enter: at the end of its last line or, after a newline, on an empty line. At a typed
// line's end a backslash becomes a newline, and more may come. False: the end, or Ctrl-C.
static bool read_message(Engine *e) {
    Buffer *message = &e->input;
    bool cut = false;
    message->n = 0;
    fputs("> ", stderr);
    for (Waiting waits = NOTHING;;) {
        const ssize_t got = read_more(STDIN_FILENO, message);
        if (got < 0 && !interrupted) die("stdin: %s", strerror(errno));
        if (got < 0 || message->n == 0) return false;
        if (got == 0) break;  // the end of input
        uint8_t *end = message->p + message->n;
        if (end[-1] != '\n') continue;  // Ctrl-D in the middle of a line
        cut |= got > TERMINAL_LINE;
        const bool pasted = waits == LINE;  // it had come, with its newline, before it was read
        waits = input_waits();
        if (waits != NOTHING) continue;
        if (!pasted && message->n > 1 && end[-2] == '\\') {
            end[-2] = '\n';
            message->n--;
        } else {
            if (got == 1) message->n--;  // an empty line is no part of the message
            if (!pasted || cut) break;
            fputs("(Enter sends) ", stderr);
        }
    }
    message->n = cut ? 0 : chop(bytes_of(message)).n;
    if (cut)
        report("input: the terminal cut a line at %d bytes; nothing was sent; /file PATH sends it",
               TERMINAL_LINE);
    return true;
}

// Sends TEXT, an empty line and a file. `text` is "PATH TEXT", the end of e->input. ~/ is $HOME.
static void send_file(Engine *e, Bytes text) {
    Buffer *message = &e->input;
    const Bytes name = take_word(&text);
    const char *home = name.n > 1 && !memcmp(name.p, "~/", 2) ? getenv("HOME") : NULL;
    const Bytes rest = bytes_from(name, home != NULL);
    char path[8192];
    snprintf(path, sizeof(path), "%s%.*s", home ? home : "", (int)rest.n, rest.p);
    buffer_cut(message, message->n - text.n);  // now text and name point to other bytes
    if (message->n) buffer_add(message, bytes("\n\n"));
    const size_t before = message->n;
    const unsigned mode = file_mode(path);
    const char *error = !*path ? "missing, expected /file PATH TEXT"
        : (mode && !S_ISREG(mode) && !S_ISDIR(mode)) || !strcmp(path, "-") ? "not a regular file"
        : file_read(message, path);
    if (!error && message->n == before) error = "empty, expected a text";
    if (interrupted) notice("/file: stopped, nothing was sent");
    else if (error)
        report("/file: %s%s%s%s", path, *path ? ": " : "", error,
               before > 0 && !mode && path[0] && path[1]
               ? " (PATH comes first, in \"\" if it has blanks)" : "");
    if (interrupted || error) return;
    check_utf8(e, "input", 1, (Bytes){message->p, before});
    check_utf8(e, path, 1, bytes_from(bytes_of(message), before));
    chat_turn(e, chop(bytes_of(message)));
}

// Sends what was typed, or runs it. Returns false if it is a command that ends the program.
static bool run_message(Engine *e) {
    Conversation *talk = &e->conversation;
    const Bytes text = bytes_of(&e->input);
    Bytes rest = text, word;
    const int command = take_command(&rest, &word);
    if (strip_end(&e->tokenizer, text).n == 0)
        report("input: only white space, nothing was sent; /help shows the commands");
    else if (memchr(text.p, '\033', text.n))
        report("input: escape characters, nothing was sent; rlwrap makes arrow keys work");
    else if (command < 0) check_utf8(e, "input", 1, text), chat_turn(e, text);
    else if (command == SEND_FILE) send_file(e, rest);
    else if (command == N_COMMANDS)
        report("%.*s: no such command, /help shows them", (int)word.n, word.p);
    else if (rest.n) report("%.*s takes no text, nothing was sent", (int)word.n, word.p);
    else if (command == HELP) fputs(help, stderr);
    else if (command == CLEAR) conversation_drop(talk, e->options.system != NULL, talk->n);
    else if (command >= LEAVE) return false;
    else if (talk->n < 2) notice("/retry: there is no answer yet");
    else if (e->sampling.temperature == 0) notice("/retry: -t 0 would draw the same answer again");
    else answer_last(e, true);
    return true;
}

static void run_dialogue(Engine *e) {
    const char *thinks = e->switched_on ? "on" : e->thinks ? "always"
                         : e->may_think ? "at will" : "off";
    e->dialogue = true;
    give_notices(e);
    notice("%s: context %d, thinking %s, /help shows the commands", e->options.model,
           e->model.context, thinks);
    for (double leaves = 0;; interrupted = 0) {  // before this time, Ctrl-C leaves
        if (!read_message(e)) {
            fputc('\n', stderr);
            if (!interrupted || now() < leaves) return;
            notice("chat: Ctrl-C again leaves, and so do /bye and Ctrl-D");
            leaves = now() + 2;
        } else if (e->input.n > 0) {
            leaves = 0;
            if (!run_message(e)) return;
        }
    }
}

// ------------------------------------------------------------------------------------------------
// Starting a run. Without options the model's own mode, sampling and chat format count.

// Sets how tokens are drawn. Greedy answers have no presence penalty but -a's.
static void choose_sampling(Engine *e) {
    const Options *o = &e->options;
    Sampler *s = &e->sampling;
    const Tables *tables = e->tokenizer.tables;
    *s = tables->advice;
    if (e->mode == CHAT && e->can_switch && !e->switched_on && s->temperature != 0)
        *s = tables->plain_advice;
    s->repetition = o->repetition >= 0 ? o->repetition : tables->advice.repetition;
    if (o->temperature >= 0) s->temperature = o->temperature;
    if (o->top_p >= 0) s->top_p = o->top_p;
    if (o->top_k >= 0) s->top_k = o->top_k;
    if (o->presence >= 0 || s->temperature == 0) s->presence = fmaxf(o->presence, 0);
    s->rng = o->seed;
}

static void prepare_places(Engine *e) {
    const size_t vocab_size = e->tokenizer.vocab_size;
    const bool list = e->options.list;
    choose_sampling(e);
    if (e->mode != TOKENIZE) prepare_passes(e, e->model.context);
    for (int i = 0; i < e->most_texts; i++) {
        Text *t = e->order[i] = &e->places[i];
        t->slot = &e->slots[i];
        t->sampler = e->sampling;
        t->sampler.in_answer = alloc(vocab_size, sizeof(bool), "the sampler");
        t->sampler.seen = alloc(vocab_size, sizeof(bool), "the sampler");
        t->writer = alloc(1, sizeof(Writer), "the texts");
        *t->writer = (Writer){.chat = e->mode == CHAT, .to = list ? &t->slot->own.out : NULL,
                              .terminal = !list && is_terminal(STDOUT_FILENO),
                              .stop = bytes(e->options.stop ? e->options.stop : "")};
    }
}

// Sets what the options and the chat format say of answers: their thinking, given ones. If the
// prompt has no <think>, the model may write one, if the format knows what to cut off old answers.
static void prepare_answers(Engine *e) {
    Tokenizer *tok = &e->tokenizer;
    const ChatFormat *f = &tok->chat;
    Ids end = {0};
    e->can_switch = !bytes_equal(f->answer_open[0], f->answer_open[1]);
    e->switched_on = e->can_switch && e->options.think > 0;
    const Bytes answer = f->answer_open[e->switched_on];
    const size_t open = find_last(answer, bytes("<think>"));
    const size_t close = find_last(answer, bytes("</think>"));
    const bool model_may = !open && !close && tok->think >= 0 && tok->end_think >= 0 &&
                           tok->tables->strip.n;
    e->thinks = e->mode == CHAT && open > close && tok->end_think >= 0;
    e->may_think = e->thinks || (e->mode == CHAT && model_may);
    encode_part(tok, bytes(end_of_budget), true, &e->budget_text);
    encode_part(tok, bytes("\n\n"), true, &e->after_think);
    // What ends an answer of an earlier turn ends each answer: a model that was fine-tuned from a
    // base model may name only <|endoftext|>, and would go on with the user's turn.
    if (e->mode == CHAT) encode_part(tok, f->close[ASSISTANT], true, &end);
    if (end.n && tok->kind[end.p[0]] & SPECIAL && !is_stop(tok, end.p[0]))
        ids_add(&tok->stop, end.p[0]);
    free(end.p);
    const char *error = e->next.n ? encode_choices(e, (Bytes){0}) : NULL;
    if (error) die("-o: %s", error);
}

// Returns the context: -c or, if it is not given, what `usage` says.
static int choose_context(const Engine *e) {
    const Config *c = &e->model.config;
    const int asked = e->options.context, least = modes[e->mode].least, most = c->max_seq_len;
    const double states = (double)count_states(1, false, false) * state_size(c);  // without -K
    const double room = memory_size() / 4 - states * sizeof(float);
    const double positions = e->mode == PERPLEXITY ? 0 : room / position_size(c);
    const int fitting = min_int((int)fmax(fmin(positions, INT_MAX) / 1024, 4) * 1024, most);
    const int context = asked < 0 ? fitting : asked == 0 ? most : asked;
    if (context < least || context > most)
        die("-c: expected %d to %d (export.py --yarn raises it), found %d", least, most, context);
    return context;
}

// In this order: the context needs the mode and the cache's bits.
static void load_model(Engine *e) {
    const Options *o = &e->options;
    Config *c = &e->model.config;
    char file[LONGEST_PATH + 16];
    check_model(o->model);
    e->file = model_map(&e->model, o->model, o->mode != TOKENIZE);
    snprintf(file, sizeof(file), "%s.tokenizer", o->model);
    if (!file_mode(file))
        die("%s: missing, expected beside the model, where export.py writes it", file);
    tokenizer_load(&e->tokenizer, file, c->vocab_size);
    e->mode = o->mode < 0 ? e->tokenizer.tables->mode : (Mode)o->mode;
    if ((o->answers || o->form) && !modes[e->mode].has_answers)
        die_usage("-%c: MODEL is made for -m %s, expected -m chat or generate",
                  o->form ? 'g' : 'o', modes[e->mode].name);
    if (strchr(modes[e->mode].idle, 'K')) e->options.keep = NULL;
    e->kind = o->member ? OWN_CHOICES : o->answers ? CHOICES : (int)e->mode;
    e->most_texts = o->list || o->answers ? min_int(MOST_TEXTS, o->batch) : 1;
    const double states = memory_size() / 4 / sizeof(float) / fmax(state_size(c), 1);
    while (e->most_texts > 1 && count_states(e->most_texts, true, o->keep) > states)
        e->most_texts--;
    c->cache_bits = o->cache_bits;
    if (c->cache_bits == 8 && c->head_dim % 16)
        die("-C 8: expected heads of a multiple of 16, found %d (%s)", c->head_dim, o->model);
    e->model.context = choose_context(e);
    if (e->mode == TOKENIZE) return;
    start_threads(o->threads > 0 ? o->threads : cpu_count());
    prepare_answers(e);
    if (e->form) list_tokens(e->form, &e->tokenizer, e->mode == CHAT);
}

// Reads the prompt. Returns false if there is none: this is a conversation.
static bool read_prompt(Engine *e) {
    const Options *o = &e->options;
    Buffer *text = &e->input;
    const bool chat = e->mode == CHAT, piped = o->file && !strcmp(o->file, "-");
    if (!chat && !o->text && !o->file) die_usage(NO_TEXT, modes[e->mode].name);
    if (o->text) buffer_add(text, bytes(o->text));
    if (!o->file) return o->text;
    if (o->text) buffer_add(text, bytes("\n\n"));
    const size_t before = text->n;
    if (piped && is_terminal(STDIN_FILENO)) notice("stdin: Ctrl-D ends the text");
    if (piped && !o->given['f'] && file_size(STDIN_FILENO) > 0 && !stdin_has_data())  // midway
        warn("stdin: read in part (a loop?); all its rest is the prompt, not -i \"$line\"");
    const char *name = piped ? "stdin" : o->file, *error = file_read(text, o->file);
    if (error)
        die("%s: %s%s", name, error, strpbrk(name, " ?") ? " (-i takes a text, not a file)" : "");
    check_utf8(e, name, 1, bytes_from(bytes_of(text), before));
    if (chat && text->n == before)
        die("%s: empty, expected a prompt%s", name,
            piped ? "; has a command before the pipe failed?" : "");
    if (chat) text->n = before + chop(bytes_from(bytes_of(text), before)).n;
    return true;
}

// ------------------------------------------------------------------------------------------------
// JSON (RFC 8259). json_take...() takes something. It returns false if another thing comes next.

typedef struct {
    Bytes rest;             // what has not been read
    size_t n;               // bytes of the whole line
    const char *error;      // or NULL; of this copy alone: after it nothing is taken any more
    bool cut;               // the error is that the line ends inside a value
    Buffer *text;           // the last string: one buffer for all copies of a Json
    const uint8_t *string;  // where it begins
    const Tokenizer *tok;   // of the messages
    Buffer ignored;         // names of members that have no effect, each after ", "
} Json;

// Sets the error if `good` is false: `part` of the line is bad at what comes next.
static void json_check(Json *j, bool good, const char *part, const char *expected) {
    if (good || j->error) return;
    const char *found = !j->rest.n ? "the end" : !*j->rest.p ? "a NUL" : "";
    j->error = say("bad %s at byte %zu, expected %s, found %s%.*s", part, j->n - j->rest.n + 1,
                   expected, found, (int)min_size(j->rest.n, 16), j->rest.p);
}

static void json_need(Json *j, bool good, const char *what) { json_check(j, good, "JSON", what); }

// If the line ends inside the word, returns false at the line's end, so that an error names this.
static bool json_take(Json *j, const char *word) {
    const size_t n = strlen(word), there = min_size(n, j->rest.n);
    if (j->error || !there || memcmp(j->rest.p, word, there) != 0) return false;
    j->rest = bytes_from(j->rest, there);
    return there == n;
}

static int json_byte(const Json *j) { return j->rest.n ? *j->rest.p : 0; }  // that comes next

static bool json_take_any(Json *j, const char *set) {  // one or more bytes of a set
    const size_t before = j->rest.n;
    while (!j->error && j->rest.n && memchr(set, *j->rest.p, strlen(set)))
        j->rest = bytes_from(j->rest, 1);
    return j->rest.n < before;
}

static bool json_take_token(Json *j, const char *word) {  // after white space; "": only skips that
    json_take_any(j, " \t\r\n");
    return json_take(j, word);
}

// Takes a character or an escape, and returns what it means: a character, or half of one.
static int json_char(Json *j) {
    const bool escape = json_take(j, "\\");
    const Char next = j->rest.n ? code_point_at(j->rest, 0) : (Char){0};
    const char *name = escape && json_byte(j) ? strchr(escapes, json_byte(j)) : NULL;
    char hex[5] = "";
    if (escape && json_take(j, "u")) {
        for (int i = 0; i < 4 && isxdigit(json_byte(j)); j->rest = bytes_from(j->rest, 1))
            hex[i++] = json_byte(j);
        json_need(j, hex[3], "4 hexadecimal digits, as in \\u00e9");
        return (int)strtol(hex, NULL, 16);
    }
    json_need(j, next.c < BAD_BYTE, "UTF-8 (iconv -f LATIN1 -t UTF-8 if it is Latin-1)");
    json_need(j, name || (next.c >= ' ' && !escape), "a character, or an escape as in \\n");
    j->rest = bytes_from(j->rest, j->error ? 0 : next.n);
    return name ? escaped[name - escapes] : (int)next.c;
}

static bool json_take_string(Json *j) {
    if (!json_take_token(j, "\"")) return false;
    j->string = j->rest.p - 1;
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

// Goes on to the next value. j->text gets an object's key. Returns false after an error or `end`.
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
                 json_take_number(j), "a value");
}

// Returns the value of an object's last member of this name, or an empty rest. Overwrites its text.
static Json json_member(Json object, const char *name) {
    Json found = {.text = object.text};
    json_take_token(&object, "{");
    for (int i = 0; json_next(&object, "}", i == 0); i++) {
        if (bytes_are(bytes_of(object.text), name)) found = object;
        json_value(&object, 1);
    }
    return found;
}

// ------------------------------------------------------------------------------------------------
// Rows: what lines of JSON (-L) mean. A row is a text, an array of messages, or an object with one.

// Adds the parts of a message's content, an array, to `text`, as the chat template joins them.
static void json_parts(Json *j, Json content, Buffer *text) {
    for (int i = 0; !j->error && json_next(&content, "]", i == 0); i++) {
        Json type = json_member(content, "type"), its_text = json_member(content, "text");
        Json bad = type.rest.n ? type : content;  // an error names the type
        json_check(&bad, json_take_string(&type) && bytes_are(bytes_of(j->text), "text") &&
                         json_take_string(&its_text), "content",
                   "parts, {\"type\": \"text\", \"text\": ...}");
        j->error = bad.error;
        if (i > 0) buffer_add(text, j->tok->tables->join);
        buffer_add(text, bytes_of(j->text));
        json_value(&content, 1);
    }
}

// Members that other programs obey. Here they have no effect: options hold for all texts.
static const char *const unread[] = {
    "tool_calls", "function_call", "images", "reasoning_content",  // these 4: a message's, too
    "tools", "functions", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "n",
    "temperature", "top_p", "top_k", "min_p", "seed", "response_format", "logprobs", "top_logprobs",
    "presence_penalty", "frequency_penalty", "logit_bias", "enable_thinking", "reasoning_effort",
    "chat_template_kwargs", "think", "system", NULL};

#define EACH_A_LINE "(jq -c '.[]' makes lines of other arrays)"

// Adds a message to `talk` and returns its role.
static int json_message(Json *j, Conversation *talk) {
    static const char *const roles[] = {"system", "user", "assistant", "developer"};
    static const char *const others[] = {"text", "value", "contents", "Content", "message", "msg",
                                         NULL};  // what stands in place of "content" by mistake
    Json name = json_member(*j, "role"), content = json_member(*j, "content");
    int role = json_take_string(&name) ? 3 : -1;  // -1: an unknown one, which is an error
    while (role >= 0 && !bytes_are(bytes_of(j->text), roles[role])) role--;
    if (role == 3) role = SYSTEM;  // OpenAI's newer name for it
    json_check(j, name.rest.n, "messages", "{\"role\": ..., \"content\": ...} " EACH_A_LINE);
    json_check(j, role >= 0, "role", "system, user or assistant (a tool's result: user)");
    for (int i = 0; i < 4 && !j->ignored.n; i++) {
        const Json value = json_member(*j, unread[i]);
        if (memchr("[{\"", json_byte(&value), 3)) buffer_print(&j->ignored, ", %s", unread[i]);
    }
    Buffer *text = &conversation_add(talk, role, (Bytes){0})->text;
    if (json_take_string(&content)) buffer_add(text, bytes_of(j->text));
    else if (json_take(&content, "[")) json_parts(j, content, text);
    else if (!json_take(&content, "null")) {  // null, or no content at all, is no text
        bool wrong = content.rest.n;
        for (int i = 0; others[i]; i++) wrong |= json_member(*j, others[i]).rest.n > 0;
        json_check(j, !wrong, "content", "a string, or an array of parts");
    }
    json_value(j, 0);
    return role;
}

// What jq makes of a row that has both, of other programs' rows by a member that they have, or of
// any other row (NAME). NULL: that member becomes the text or the messages.
static const struct { const char *member, *jq; } other_rows[] = {
    {"text", "del(.text)"}, {"role", "[.]"}, {"body", "{custom_id} + .body"}, {"prompt", NULL},
    {"conversations", ".messages = [.conversations[] | {role: (.from // .role | {human: \"user\", "
                      "gpt: \"assistant\"}[.] // .), content: (.value // .content)}]"},
    {"instruction", ".text = .instruction + \"\\n\\n\" + .input"}, {"question", NULL},
    {"input", NULL}, {"content", NULL}, {"NAME", NULL}, {NULL, NULL}};
#define EITHER "one of \"text\": \"...\" and, in chat, \"messages\": [...]"

// Returns what is expected of an object that has both text and messages, or neither.
static const char *expect_text(Json row) {
    int i = 0;
    while (other_rows[i + 1].member && !json_member(row, other_rows[i].member).rest.n) i++;
    const Json value = json_member(row, other_rows[i].member);
    const char *to = json_byte(&value) == '[' ? "messages" : "text", *name = other_rows[i].member;
    const char *jq = other_rows[i].jq ? other_rows[i].jq : say(".%s = .%s", to, name);
    return say(EITHER " (jq -c '%s')", jq);
}

// Goes to the text or the messages of an object. Its other members go to `out`, each with a comma.
// They do so even if *j gets an error here, because `all` is a copy: a wrong row keeps its members.
static void json_object(Json *j, int kind, Buffer *out) {
    const Bytes text = json_member(*j, "text").rest, messages = json_member(*j, "messages").rest;
    Json all = *j;
    Buffer twice = {0};  // members that results have, too, as jq names them
    json_take(&all, "{");
    buffer_add(out, bytes("{"));
    for (int i = 0; json_next(&all, "}", i == 0); i++) {
        const uint8_t *member = all.string;
        const Bytes name = bytes_of(j->text);
        const char *const *added = modes[kind].members, *const *ignored = unread;
        while (*added && !bytes_are(name, *added)) added++;
        while (*ignored && !bytes_are(name, *ignored)) ignored++;
        const bool kept = !*added && !bytes_are(name, "text") && !bytes_are(name, "messages");
        if (*ignored) buffer_print(&j->ignored, ", %s", *ignored);
        if (*added) buffer_print(&twice, twice.n ? ", .%s" : ".%s", *added);
        json_value(&all, 1);
        if (kept) buffer_add(out, (Bytes){member, all.rest.p - member});
        if (kept) buffer_add(out, bytes(","));
    }
    const char *names = (const char *)twice.p;
    if (names)
        j->error = say("has what this run adds, %s; jq -c 'del(%s)' takes it away; to keep one of "
                       "them: jq -c '.gold = %.*s | del(%s)'", names, names,
                       (int)strcspn(names, ","), names, names);
    free(twice.p);
    if (j->error) return;
    json_check(j, text.n ? !messages.n && *text.p == '"' : messages.n && *messages.p == '[',
               "text or messages", !text.n == !messages.n ? expect_text(*j) : EITHER);
    if (!j->error) j->rest = text.n ? text : messages;
}

// Takes the given answers of an object's member `name`. Returns what is wrong with it, or NULL.
static const char *take_choices(Json object, const char *name, Choices *all) {
    Json array = json_member(object, name), start = array;  // start: for the message
    bool good = json_take(&array, "[");
    if (!start.rest.n)
        return say("no member \"%.99s\", expected an array of this name (-o @NAME; no file)", name);
    Json end = start;
    json_value(&end, 1);
    const char *error = wrong_memory(start.rest.n - end.rest.n);  // taken apart it is as large
    if (error) return say("member \"%.99s\": %s", name, error);
    for (; all->n > 0; all->n--) {  // of an earlier object
        free(all->p[all->n - 1].text.p);
        free(all->p[all->n - 1].ids.p);
    }
    for (int i = 0; good && json_next(&array, "]", i == 0); i++) {
        good = json_take_string(&array) && object.text->n;
        if (good) add_choice(all, bytes_of(object.text));
    }
    json_check(&start, good && all->n > 1, name, "an array of two or more strings, none empty");
    return start.error;
}

// Parses one line. A string goes to j->text, messages go to `talk`, if that is not NULL.
static void json_line(Json *j, Conversation *talk, int kind, Buffer *out) {
    json_take_token(j, "");
    Json all = *j;  // looks at the whole line before anything is taken
    json_value(&all, 0);
    json_take_token(&all, "");
    json_need(&all, all.rest.n == 0, "the end of the line");
    j->error = all.error;
    j->cut = j->error && all.rest.n == 0;
    if (json_byte(j) == '{' && !j->error) json_object(j, kind, out);
    const bool messages = talk && json_take(j, "[");
    int role = -1;
    for (int i = 0; messages && json_next(j, "]", i == 0); i++) {
        role = json_message(j, talk);
        json_check(j, role != SYSTEM || !j->tok->tables->no_systems, "role", "no system message: "
                   "the chat template has none, its text may begin the user's");
        json_check(j, role != SYSTEM || i == 0 || j->tok->tables->systems, "role",
                   "a system message only at the start");
        if (role == SYSTEM && i == 0 && talk->n > 1) buffer_print(&j->ignored, ", -y with system");
        if (role == SYSTEM && i == 0) conversation_drop(talk, 0, talk->n - 1);  // that of -y
    }
    json_check(j, messages || json_take_string(j), "text or messages", json_byte(j) == '['
               ? "with -m chat messages, else no array " EACH_A_LINE
               : "a string, an object or, with -m chat, an array of messages");
    json_check(j, !messages || role >= USER, "role", "messages, the last of the user or assistant");
}

// ------------------------------------------------------------------------------------------------
// Lists (-l, -L): many texts run together. Each is a line, and so is its result, in the same order.

enum { AHEAD = 1024, AHEAD_BYTES = 16 << 20 };  // lines that may wait for an earlier one
enum { KNOWN_AGAIN = 8 };                       // whole lines of FILE that run again (-w)

typedef struct {
    Engine *e;
    Lines in;
    size_t failed;          // lines that were an error
    bool named;             // a line that was read had the member of -o @NAME
    size_t nameless;        // new lines without it while none had it: the first is reported
    bool silent;            // the line that is read is another of these
    size_t read;            // lines that were read
    size_t written;         // lines that were written
    Buffer lines[AHEAD];    // of the output: line i is at i % AHEAD; it is done if it ends in \n
    size_t prompt_tokens;   // of all texts
    size_t cached;          // tokens of prompts that did not need to run
    size_t drawn;           // tokens of all answers
    size_t endings[FAILED + 1];  // answers by their end
    size_t in_thinking;     // answers that ended inside it
    size_t unlikely;        // given answers of less mass than 0.1
    size_t closed[NOT_CLOSED + 1]; // thinkings by what ended them: see endings
    size_t pieces;          // texts that are scored in pieces
    size_t odd;             // lines with what has no effect, or plain ones that look like CSV
    size_t columns[3];      // tabs, commas, semicolons, if lines 1 to 3 have as many, else 0
    size_t in_file;         // -w: whole lines that FILE had
    size_t failed_in_file;  // of these, lines without a result
    size_t first_failed;    // the number of the first one, from 1
    Buffer tail;            // -w: what FILE ended with, and has not come again yet
    bool left;              // -w: a last line without a newline was left for the next run
} List;

static bool has_newline(Bytes line) { return line.n && line.p[line.n - 1] == '\n'; }
static Buffer *line_of(List *l, size_t number) { return &l->lines[number % AHEAD]; }

// Writes the next line. What FILE ended with has to be the same, and is not written again.
static void write_line(List *l) {
    Buffer *buffer = line_of(l, l->written);
    const Bytes line = bytes_of(buffer);
    const size_t known = min_size(l->tail.n, line.n);
    const char *file = l->e->options.out;
    const bool last = l->written > 0 && l->written + 1 >= l->in_file;  // only this line may differ
    if (!bytes_equal((Bytes){l->tail.p, known}, (Bytes){line.p, known}))
        die("%s: another run's (line %zu), expected this one's or a new FILE: the list, a prompt, "
            "the model, an option or the build has changed (a version before 7.0 wrote \\u000a for "
            "\\n, it can go on)%s", file, l->written + 1, !last ? "" :
            say("; if only the last line has: sed -i '$d' %.300s takes its result away", file));
    buffer_cut(&l->tail, known);
    write_results(bytes_from(line, known));
    free(buffer->p);
    *buffer = (Buffer){0};
    l->written++;
}

// Counts a line that FILE does not have yet, and reports its error.
static void count_line(List *l, size_t number, const Text *t, const char *error) {
    if (error && (t || !l->silent)) report("%.600s: line %zu: %s", l->in.name, number + 1, error);
    l->failed += error != NULL;
    if (!t && !error) l->prompt_tokens += l->e->prompt.n;
    if (!t) return;
    const Slot *slot = t->slot;
    double sum, mass = 1;
    l->prompt_tokens += slot->own.prompt.n;
    l->cached += slot->cached;
    l->drawn += slot->drawn;
    l->endings[t->ending]++;
    l->in_thinking += slot->thinking;
    if (chooses(l->e) && t->ending == COMPLETE)
        slot->own.choices.p[find_likeliest(slot, &sum, &mass)].n_chosen++;
    l->unlikely += mass < 0.1;
    l->closed[slot->closed_by]++;
    l->pieces += l->e->mode == PERPLEXITY && slot->own.prompt.n > t->context;
}

// Ends line `number` with its text's result, its ids or an error. Writes what is done, in order.
static void end_line(List *l, size_t number, const Text *t, const char *error) {
    if (number >= l->in_file) count_line(l, number, t, error);
    if (t) writer_end(t->writer);
    add_result(line_of(l, number), l->e, t, error);
    while (!interrupted && has_newline(bytes_of(line_of(l, l->written)))) write_line(l);
}

#define CSV_TO_JSON \
    "if this is CSV: python3 -c 'import csv, json, sys; [print(json.dumps(row)) for row in " \
    "csv.DictReader(sys.stdin, delimiter=\",\")]' makes objects, for -L (TSV: delimiter=\"\\t\")"

// Says so, once, if line 1 looks like JSON or an old Mac's file, or if the list looks like a table:
// by its name, a quote that stays open, or separators of which lines 1 to 3 have as many.
static void check_plain(List *l, Json line) {
    const Bytes text = line.rest;
    const bool first = l->read == 0;
    const char *end = first ? strrchr(l->in.name, '.') : NULL;
    bool table = end && (!strcasecmp(end, ".csv") || !strcasecmp(end, ".tsv")), quoted = false;
    size_t count[256] = {0};  // of each byte, outside quotes
    for (size_t i = 0; i < text.n; i++) {
        quoted ^= text.p[i] == '"';
        count[text.p[i]] += !quoted;
    }
    for (int i = 0; i < 3 && l->read < 3; i++) {
        const size_t n = count[(uint8_t)"\t,;"[i]];
        l->columns[i] = first || l->columns[i] == n ? n : 0;
        table |= l->read == 2 && l->columns[i] > 0;
    }
    quoted &= *text.p == '"' || find_last(text, bytes(",\"")) > 0;
    if (first && memchr("[{\"", *text.p, 3)) json_value(&line, 0);  // else line.rest is all of it
    const bool json = first && line.rest.n == 0 && text.n && (text.n == 1 || !line.error);
    const char *what = quoted ? "leaves a quote open; " CSV_TO_JSON
        : table ? "is taken whole, with all its columns; " CSV_TO_JSON
        : json ? "is JSON, and taken as plain text; -L reads JSON"
        : first && memchr(text.p, '\r', text.n) ? "has \\r inside; tr '\\r' '\\n' makes it lines"
        : NULL;
    if (what && l->odd++ == 0) warn("%.600s: line %zu %s", l->in.name, l->read + 1, what);
}

// Makes a line's conversation: messages, or its text after -i's. Returns what is wrong, or NULL.
static const char *take_line(List *l, Bytes line) {
    const Options *o = &l->e->options;
    const bool chat = l->e->mode == CHAT;
    Conversation *talk = &l->e->conversation;
    Json j = {.rest = line, .n = line.n, .text = &l->e->input, .tok = &l->e->tokenizer};
    conversation_drop(talk, 0, talk->n);
    if (chat && o->system) conversation_add(talk, SYSTEM, bytes(o->system));
    if (o->given['L']) json_line(&j, chat ? talk : NULL, l->e->kind, line_of(l, l->read));
    else check_plain(l, j);
    const bool opens = memchr("[{", *line.p, 2);
    if (j.error && l->read == 0 && (j.cut || !opens))  // the list may be another program's
        notice("%.600s: line 1 is no JSON? %s", l->in.name,
               opens ? "jq -c . makes lines, jq -c '.[]' of an array of texts"
                     : "-l takes plain lines; " CSV_TO_JSON);
    const bool messages = talk->n > 0 && talk->p[talk->n - 1].role != SYSTEM;
    if (messages && o->text) buffer_add(&j.ignored, bytes(", -i before messages"));
    if (j.ignored.n && l->odd++ == 0)
        notice("%.600s: line %zu: no effect: %.*s (options hold for all lines)", l->in.name,
               l->read + 1, (int)j.ignored.n - 2, j.ignored.p + 2);
    free(j.ignored.p);
    if (j.error || messages) return j.error;
    if (o->given['L']) line = bytes_of(j.text);
    Buffer *text = &conversation_add(talk, USER, bytes(o->text ? o->text : ""))->text;
    if (o->text) buffer_add(text, bytes("\n\n"));
    buffer_add(text, line);
    return line.n ? NULL : wrong_size(l->e, 0);  // also where -i has a text
}

// Encodes a line into e->prompt, after Ctrl-C perhaps not all. Returns what is wrong, or NULL.
static const char *encode_line(List *l, Bytes line) {
    Engine *e = l->e;
    const Json object = {.rest = line, .n = line.n, .text = &e->input};
    const bool chat = e->mode == CHAT, own = e->kind == OWN_CHOICES;
    const Conversation *talk = &e->conversation;
    l->silent = false;
    if (line.n > l->in.most) return "too long, expected at most 1 GB, less where memory is small";
    const char *error = take_line(l, line);
    if (own) e->reserve = 0;  // not known yet
    const bool lacks = !error && own && !json_member(object, e->options.member).rest.n;
    l->named |= own && !error && !lacks;
    l->silent = lacks && !l->named && l->read >= l->in_file && l->nameless++ > 0;
    if (!error && own) error = take_choices(object, e->options.member, &e->next);
    size_t size = 0;
    for (size_t i = 0; i < talk->n; i++)
        size += chat && !e->tokenizer.tables->keeps ? content_of(&e->tokenizer, talk, i).n
                                                 : talk->p[i].text.n;
    if (!error && size) error = wrong_size(e, size);  // messages may be empty: see take_line
    if (error) return error;
    encode_prompt(e, talk, 0);
    error = interrupted ? NULL : wrong_length(e, e->prompt.n, false);
    if (!error && own) error = encode_choices(e, chat ? (Bytes){0} : bytes_of(&talk->p[0].text));
    return error;
}

// Encodes a line. Its text waits to run. If it is wrong, or only tokenized, it is done at once.
static void add_line(List *l, Bytes line) {
    Engine *e = l->e;
    const Options *o = &e->options;
    const size_t number = l->read;
    if (!o->given['L']) check_utf8(e, l->in.name, number + 1, line);
    if (number == l->in_file && number)
        notice("%s: has %zu lines, goes on with line %zu; a change before its last %d lines is not "
               "seen", o->out, number, number + 1, KNOWN_AGAIN);
    if (number == l->in_file && draws_ids(e) && !quiet && !o->given['s'] && !o->out)
        fprintf(stderr, "seed %llu\n", o->seed);
    const char *error = encode_line(l, chop(line));
    if (interrupted) return;
    if (!error) give_notices(e);
    l->read++;
    if (error || e->mode == TOKENIZE) {
        end_line(l, number, NULL, error);
    } else {
        const bool begun = e->conversation.p[e->conversation.n - 1].role == ASSISTANT;
        add_text(e, &e->prompt, o->seed + number, begun)->slot->number = number;
        if (begun && number == l->in_file)
            notice("%.600s: line %zu: its last message is the assistant's, and the answer goes on "
                   "from it; for a new one: jq -c 'del((.messages? // .)[-1])'", l->in.name,
                   number + 1);
    }
}

// Shows the progress, in texts. Those that run do not count yet: nobody knows how long they get.
// But the oldest one is taken to need its age once more at least, because it may be the last.
static void show_texts(const List *l) {
    const double here = l->in_file + l->failed, time = now(), seconds = time - progress.start;
    const double lines = file_size(l->in.fd) * l->read / fmax(l->in.taken, 1);
    const double all = fmax((l->in.ended ? l->read : floor(lines)) - here, 0);
    const double done = fmax((double)l->read - l->e->n_texts - here, 0);
    const double age = l->e->n_texts > 0 ? time - l->e->order[0]->slot->start : 0;
    const double part = all > 0 ? fmin(done / all, seconds / (seconds + age + 1e-9)) : 0;
    const char *of = l->in.ended ? " of" : " of about";
    progress_show(l->e->n_rows, part, all > 0 ? say("%.0f%s %.0f texts", done, of, all)
                                              : say("%.0f texts", done));
}

// Reads lines and adds their texts while there are places. While texts run, it does not wait for
// lines that another program has still to write. Returns false if all is done, or after Ctrl-C.
static bool admit_lines(List *l) {
    for (Bytes line;;) {
        size_t ahead = 0;  // bytes of lines that wait for an earlier one
        show_texts(l);
        for (size_t i = l->written; i < l->read; i++) ahead += line_of(l, i)->n;
        if (l->in.ended || l->e->n_texts == l->e->most_texts || l->read - l->written == AHEAD ||
            ahead > AHEAD_BYTES || interrupted)
            break;
        next_line(&l->in, &line, l->e->n_texts == 0);
        if (line.n == 0 || bytes_are(line, "\x1A")) break;  // the end (DOS's, too), or a pause
        const bool begun = l->tail.n && !has_newline(bytes_of(&l->tail));  // FILE has a part of it
        if (l->e->options.out && !has_newline(line) && l->read >= l->in_file && !begun) {
            warn("%.600s: line %zu has no newline: half written? Left for the next run",
                 l->in.name, l->read + 1);
            l->left = true;
            break;
        }
        add_line(l, line);
    }
    return l->e->n_texts > 0 && !interrupted;
}

// Says once how many answers did not end by themselves, and if nearly all texts got one label.
static void warn_of_answers(const List *l) {
    const size_t scored = l->endings[COMPLETE];
    size_t all = 0;
    Buffer ended = {0};
    for (int i = 0; i <= FAILED; i++) all += l->endings[i];
    for (int i = IN_THINKING + 1; i < INTERRUPTED; i++)
        if (l->endings[i]) buffer_print(&ended, ", by %s: %zu", endings[i].by, l->endings[i]);
    if (l->in_thinking) buffer_print(&ended, ", inside their thinking: %zu", l->in_thinking);
    if (ended.n) warn("answers: of %zu ended%s", all, ended.p + 1);
    free(ended.p);
    if (l->unlikely) warn(UNLIKELY, l->unlikely, scored);
    for (int i = 0; l->e->kind == CHOICES && scored >= 20 && i < l->e->next.n; i++) {
        const Choice *c = &l->e->next.p[i];
        if (c->n_chosen >= 0.9 * scored)
            warn("choices: \"%.*s\" in %zu of %zu texts: see the division in RECIPES.md",
                 (int)c->text.n, c->text.p, c->n_chosen, scored);
    }
}

// Writes the notices and statistics of the whole list. Returns the program's exit status.
static int report_list(const List *l) {
    const Options *o = &l->e->options;
    const double seconds = now() - progress.start + 1e-9;
    const double rate = (l->prompt_tokens - l->cached + l->drawn) / seconds;
    const size_t lines = l->written > l->in_file ? l->written : l->in_file;  // that are there
    const size_t n = lines - l->in_file;
    const int context = l->e->model.context;
    const bool had_all = l->in_file && n == 0 && !interrupted && !l->left;
    const int status = interrupted ? EXIT_INTERRUPT : l->failed || l->failed_in_file ? 1 : 0;
    progress_end();
    if (had_all)
        notice("%s: has all %zu lines%s; another FILE, or none, makes a new run", o->out, lines,
               lines > KNOWN_AGAIN ? say(" (only the last %d were compared)", KNOWN_AGAIN) : "");
    warn_of_answers(l);
    for (int i = 0; i < INTERRUPTED; i++)
        if (l->closed[i])
            notice("answers: thinking ended by %s: %zu", endings[i].by, l->closed[i]);
    if (l->failed > 1) notice("texts: ended in an error: %zu", l->failed);
    if (l->pieces) notice("texts: scored in pieces of %d tokens (-c): %zu", context, l->pieces);
    if (interrupted)
        notice("list: %zu lines are written; the same command%s%s goes on%s", lines,
               o->out ? "" : " with -w FILE for > FILE",
               draws_ids(l->e) && !o->given['s'] && !o->out ? say(" and -s %llu", o->seed) : "",
               file_size(l->in.fd) ? "" : ", if the pipe gives the same lines again");
    if (quiet || had_all) return status;
    fprintf(stderr, "%zu texts in %.1f s, prompts %zu tokens (%zu cached)", n, seconds,
            l->prompt_tokens, l->cached);
    if (modes[l->e->mode].has_answers) fprintf(stderr, ", answers %zu tokens", l->drawn);
    fprintf(stderr, ", %.*f tokens/s", RATE(rate));
    if (draws_ids(l->e) && n > 0)
        fprintf(stderr, ", seeds %llu to %llu", o->seed + l->in_file, o->seed + lines - 1);
    fputc('\n', stderr);
    return status;
}

static int run_list(List *l) {
    progress.start = now();
    patience = 0;
    if (l->failed_in_file)
        warn("%s: lines without a result, which stay: %zu, the first is line %zu",
             l->e->options.out, l->failed_in_file, l->first_failed);
    if (is_terminal(l->in.fd)) notice("%s: each line is a text; Ctrl-D ends the list", l->in.name);
    while (admit_lines(l) && run_pass(l->e)) {
        for (int i = 0; i < l->e->n_running;) {  // end_text puts the next one at i
            Text *t = l->e->order[i];
            if (t->ending == GOES_ON || !end_text(l->e, t)) i++;
            else end_line(l, t->slot->number, t, t->ending == FAILED ? why_failed(t) : NULL);
        }
    }
    if (l->in.taken == 0 && !interrupted)
        die("%s: no lines, expected some; has a command before a pipe failed?", l->in.name);
    if (l->tail.n && !interrupted)
        die("%s: has more lines than the list, expected at most %zu", l->e->options.out, l->read);
    return report_list(l);
}

// ------------------------------------------------------------------------------------------------
// Going on with a list (-w). FILE has the results of a run that was cut. Its last whole lines, and
// one that was cut, run again and have to come out the same (write_line): so FILE is this run's.
// (One line is too few: other options often give the same label.) What follows them is written.

// Returns whether a line is null, or an object that this program gave its "error".
static bool lacks_result(Engine *e, Bytes line) {
    const Json j = {.rest = line, .n = line.n, .text = &e->input};
    return bytes_are(chop(line), "null") || (find_last(line, bytes(":null,\"" REASON "\":\"")) &&
                                             json_member(j, REASON).rest.n);  // no inner object's
}

// FILE takes the place of stdout. Its lines are counted, and the last ones are kept.
static void open_out(List *l) {
    const char *file = l->e->options.out;
    Buffer *tail = &l->tail;
    Lines in = {.fd = file_open(file, true), .name = file, .most = INT_MAX};
    if (in.fd < 0) die("%s: %s, expected a file that can be made", file, strerror(errno));
    if (!S_ISREG(file_mode(file))) die("%s: not a regular file, expected one or a new name", file);
    if (!file_lock(in.fd)) die("%s: in use by another run, expected its end or another FILE", file);
    for (Bytes line; next_line(&in, &line, true);) {
        buffer_add(tail, line);
        if (!has_newline(line)) break;
        if (++l->in_file > KNOWN_AGAIN)
            buffer_cut(tail, (uint8_t *)memchr(tail->p, '\n', tail->n) + 1 - tail->p);
        if (lacks_result(l->e, line) && l->failed_in_file++ == 0) l->first_failed = l->in_file;
    }
    free(in.data.p);
    if (dup2(in.fd, STDOUT_FILENO) < 0) die("%s: %s", file, strerror(errno));
    stdout_name = file;
}

// Opens the list, and with -w also FILE: then skips the lines that it has, but for the last ones.
static List *open_list(Engine *e) {
    static List list, *l = &list;
    const Options *o = &e->options;
    const char *name = o->list, *file = o->out;
    *l = (List){.e = e};
    l->in = (Lines){.fd = file_open(name, false), .name = strcmp(name, "-") ? name : "stdin",
                    .most = fmin(1 << 30, memory_size() / 16)};
    const char *error = strerror(errno);
    if (l->in.fd < 0) die("%s: %s, expected a file of lines%s", name, error, name_hint(name));
    if (file) open_out(l);
    if (same_file(l->in.fd, STDOUT_FILENO))
        die("%s: is the list and %s, expected another FILE", file ? file : l->in.name,
            file ? "-w's" : "stdout");
    const size_t skipped = l->in_file - min_size(l->in_file, KNOWN_AGAIN);
    for (Bytes line; l->read < skipped && next_line(&l->in, &line, true); l->read++) l->written++;
    return l;
}

// ------------------------------------------------------------------------------------------------
// main: what the options lead to

static int run_mode(Engine *e) {
    const char *system = e->options.system;
    split_answers(e);
    if (e->options.form) e->form = make_form(e->options.form);
    // Before the model, because it fails fast, and FILE becomes stdout:
    List *list = e->options.list ? open_list(e) : NULL;
    load_model(e);
    prepare_places(e);
    if (e->options.keep) load_kept(e, list ? list->in.fd : -1);
    const bool chat = e->mode == CHAT;
    if (e->options.text) check_utf8(e, "-i", 1, bytes(e->options.text));
    if (system) check_utf8(e, "-y", 1, bytes(system));
    if (chat && system && e->tokenizer.tables->no_systems)
        die("-y: the chat template has no system message, expected its text before the user's");
    if (chat && system) conversation_add(&e->conversation, SYSTEM, bytes(system));
    if (list) return run_list(list);
    const bool single = read_prompt(e);
    if (e->mode != TOKENIZE) patience = 1;
    if (!single && is_terminal(STDIN_FILENO)) run_dialogue(e);
    else if (!single) run_script(e);
    else chat_turn(e, bytes_of(&e->input));
    return interrupted ? EXIT_INTERRUPT : EXIT_SUCCESS;
}

#ifndef TEST
int main(int argc, char **argv) {
    static Engine engine;
    start_platform(&argc, &argv);
    engine.options = parse_options(argc, argv);
    return run_mode(&engine);
}
#endif

// ================================================================================================
// PART III. THE MACHINE
// ================================================================================================

#if defined(__OPTIMIZE__) && !defined(__clang__)
#pragma GCC pop_options  // Part III has the command line's -O again
#endif
#include <fcntl.h>
#include <pthread.h>
#ifdef _WIN32
#include <windows.h>
#else
#include <poll.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <termios.h>
#endif

// ------------------------------------------------------------------------------------------------
// SIMD primitives. (A pass begins in forward_job.) A port adds a block here; for its tiles' sizes,
// TILE_VECS, TILE_TOKENS and ATT_QUERIES, see .github/CONTRIBUTING.md. A vector is LANES floats or
// int32s, LANES is 4, 8 or 16. (It is an extension of GCC and clang: + - * and so on work lane by
// lane.) Each block has five functions, which tests/test.c compares with their definition:
//
//   dot4(acc, w, x)      acc + the sum of 4 products of bytes of w and x, in each lane
//   mul_add_v(a, b, c)   a * b + c in each lane, rounded once if FUSED is 1, else twice
//   pick_levels(t, n)    byte n % 16 of t, which repeats the same 16 bytes, for each byte of n
//   load_halves(p)       LANES floats of 16 bits from p on
//   load_bytes(p)        LANES int8 from p on, as floats
//
// Quantized x lies in -127 .. 127, so no partial sum overflows, even if a file's w holds -128. Some
// instructions take w as unsigned bytes: there W_BIAS = 128 is added to w, and bias_fix, which is
// -128 sum(x), to the sum: (w + 128) . x = w . x + 128 sum(x). Without W_BIAS, w has a sign.

#define VECTOR_TYPES                                                        \
    typedef float VecF __attribute__((vector_size(4 * LANES), may_alias));  \
    typedef int32_t VecI __attribute__((vector_size(4 * LANES), may_alias))

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#include <immintrin.h>
#define SIMD "AVX-512 VNNI"
enum { LANES = 16, TILE_VECS = 2, TILE_TOKENS = 6, ATT_QUERIES = 12, W_BIAS = 128, FUSED = 1 };
VECTOR_TYPES;
INLINE VecI dot4(VecI acc, VecI w, VecI x) {
    return (VecI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}
INLINE VecF mul_add_v(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
INLINE VecI pick_levels(VecI table, VecI n) {
    return (VecI)_mm512_shuffle_epi8((__m512i)table, (__m512i)n & _mm512_set1_epi8(15));
}
INLINE VecF load_halves(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE VecF load_bytes(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#ifdef __AVXVNNI__
#define SIMD "AVX-VNNI"
enum { LANES = 8, TILE_VECS = 1, TILE_TOKENS = 6, ATT_QUERIES = 6, W_BIAS = 128, FUSED = 1 };
#else
#define SIMD "AVX2"
enum { LANES = 8, TILE_VECS = 1, TILE_TOKENS = 4, ATT_QUERIES = 6, W_BIAS = 0, FUSED = 1 };
#endif
VECTOR_TYPES;
INLINE VecI dot4(VecI acc, VecI w, VecI x) {
#ifdef __AVXVNNI__
    return (VecI)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
#else
    // w x = |w| (sign(w) x), because the first operand has no sign. Two products fit into an int16.
    __m256i u = _mm256_abs_epi8((__m256i)w), s = _mm256_sign_epi8((__m256i)x, (__m256i)w);
    __m256i pairs = _mm256_maddubs_epi16(u, s);
    return acc + (VecI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}
INLINE VecF mul_add_v(VecF a, VecF b, VecF c) { return _mm256_fmadd_ps(a, b, c); }
INLINE VecI pick_levels(VecI table, VecI n) {
    return (VecI)_mm256_shuffle_epi8((__m256i)table, (__m256i)n & _mm256_set1_epi8(15));
}
INLINE VecF load_halves(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE VecF load_bytes(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define SIMD "NEON dotprod"
enum { LANES = 4, TILE_VECS = 2, TILE_TOKENS = 6, ATT_QUERIES = 6, W_BIAS = 0, FUSED = 1 };
VECTOR_TYPES;
INLINE VecI dot4(VecI acc, VecI w, VecI x) {
    return (VecI)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)x);
}
INLINE VecF mul_add_v(VecF a, VecF b, VecF c) {
    return (VecF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE VecI pick_levels(VecI table, VecI n) {
    return (VecI)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)n & vdupq_n_u8(15));
}
INLINE VecF load_halves(const uint16_t *p) {
    return (VecF)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
INLINE VecF load_bytes(const int8_t *p) {
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(load_i32(p))));
    return (VecF)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
#else
#define SIMD "plain C"
enum { LANES = 4, TILE_VECS = 1, TILE_TOKENS = 4, ATT_QUERIES = 6, W_BIAS = 0, FUSED = 0 };
VECTOR_TYPES;
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
INLINE VecF load_halves(const uint16_t *p) {
    return (VecF){half_float(p[0]), half_float(p[1]), half_float(p[2]), half_float(p[3])};
}
INLINE VecF load_bytes(const int8_t *p) { return (VecF){p[0], p[1], p[2], p[3]}; }
#endif

enum { FLIP = W_BIAS ? (int32_t)0x80808080 : 0 };  // ^ FLIP adds W_BIAS to each byte

// UNROLL stands before loops over arrays of vectors, so that the arrays stay in registers.
#if !defined(UNROLL) && defined(__clang__)  // sanitizers: empty, because compiling takes minutes
#define UNROLL _Pragma("clang loop unroll(full)")
#elif !defined(UNROLL)
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE VecI splat(int32_t value) { return (VecI){0} + value; }
INLINE VecF splat_f(float value) { return value - (VecF){0}; }  // -0 + 0 would lose the sign

INLINE VecI load_vector(const void *p) {
    VecI value;
    memcpy(&value, p, sizeof(value));
    return value;
}

// ------------------------------------------------------------------------------------------------
// Vector math: loops that compilers vectorize

INLINE float mul_add(float a, float b, float c) { return FUSED ? fmaf(a, b, c) : a * b + c; }

// a if yes is 1, b if it is 0. Branch-free: GCC does not vectorize ?: where floats are compared.
INLINE float choose(int32_t yes, float a, float b) {
    return as_float((load_i32(&a) & -yes) | (load_i32(&b) & (yes - 1)));
}

// If |x| < 2^22, the float x + 1.5 * 2^23 has no bits left for a fraction. Read as an integer, it
// is 0x4B400000 + x, with x rounded to the nearest integer (ties to even), also if x < 0.
#define ROUNDER 12582912.0f

// exp(x) = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2; e^r is a polynomial (Cephes expf).
// exp(0) is exactly 1. Below -126.5 ln 2 it is 0, because n = -127 makes the exponent's bits 0.
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
    // The bits of `shifted` are 0x4B400000 + n. The shift leaves n + 127, as an exponent: 2^n.
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

// Shifted left by 13, exponent and fraction stand where a float has them. But an exponent e, which
// means 2^(e - 15), is read as 2^(e - 127): hence 2^112. Infinity and NaN get a float's highest.
INLINE float half_float(uint16_t half) {
    const uint32_t bits = (half & 0x7FFFu) << 13, sign = (half & 0x8000u) << 16;
    const float value = as_float(bits) * 0x1p112f;
    return as_float((uint32_t)load_i32(&value) | sign | (bits >= 0x0F800000 ? 0x7F800000 : 0));
}

#ifdef PLAIN
#undef SIMD
#define SIMD "-DPLAIN"
static void start_threads(int count) { (void)count; }
static double position_size(const Config *c) { return 8.0 * c->n_kv_layers * c->kv_dim; }
#else  // not PLAIN, up to the end of the section "The work of a layer"

// ------------------------------------------------------------------------------------------------
// The KV cache: a pool of blocks of BLOCK positions, the floats of a SIMD vector. So memory is
// touched only as positions come into use. (FILE of -K has blocks as they are here: make_head tells
// versions apart, MAGIC does not.) For each pair of layer and kv head, a block has a cell:
//
//   keys    (head_dim, BLOCK positions)
//   values  (value_dim / LANES, BLOCK positions, LANES columns)
//
// so that a vector of keys gives a vector of scores, one of values LANES columns of the result; and
// a tile of attention reads keys from front to back, its values as one unbroken part of each cell.
//
// With 8 bits, each 16 vectors are a record (16 divides head_dim). It has one group, elements e0 ..
// e15, of each position p0, p1, .. of the block. If LANES is 8, the vectors are
//
//   of keys    e0 of p0 .. p7 | e1 of p0 .. p7 | .. | e15 of p0 .. p7
//   of values  e0 .. e7 of p0 | .. | e0 .. e7 of p7 | e8 .. e15 of p0 | .. | e8 .. e15 of p7
enum { BLOCK = LANES };

typedef struct {
    int8_t int8[16 * LANES];
    float scale[BLOCK];       // of each position's group
} Packed;

// Columns of the values: head_dim, and zeros up to whole tiles
static int value_dim(const Config *c) { return round_up(c->head_dim, 2 * LANES); }

// Where (in floats) the cell of a pair in a block begins. The number of pairs is made odd: with an
// even one, all blocks of a head would share a fraction of the L2 cache's sets.
static size_t cell_at(const Config *c, size_t block, size_t pair) {
    const size_t pairs = c->n_kv_layers * c->n_kv_heads | 1, n = c->head_dim + value_dim(c);
    const size_t size = c->cache_bits == 8 ? n / 16 * sizeof(Packed) / sizeof(float) : n * BLOCK;
    return (block * pairs + pair) * size;
}

static size_t block_size(const Config *c) { return cell_at(c, 1, 0); }  // block 1 follows block 0
static double position_size(const Config *c) { return 4.0 * block_size(c) / BLOCK; }

static float *cache_cell(const Pass *p, size_t pair, const int *blocks, int pos) {
    return p->cache + cell_at(&p->m->config, blocks[pos / BLOCK], pair);
}

// The index in a cell, were it floats, of element j of the key, or of the value, of position pos
static int index_in_cell(const Config *c, int pos, int j, bool value) {
    const int vector = c->head_dim + j / LANES * BLOCK + pos % BLOCK;
    return value ? vector * LANES + j % LANES : j * BLOCK + pos % BLOCK;
}

// Stores x (head_dim), the key, or the value, of a row.
static void cache_store(const Pass *p, size_t pair, const Row *row, const float *x, bool value) {
    const Config *c = &p->m->config;
    float *cell = cache_cell(p, pair, row->blocks, row->pos);
    if (c->cache_bits != 8) {
        for (int j = 0; j < c->head_dim; j++) cell[index_in_cell(c, row->pos, j, value)] = x[j];
        return;
    }
    for (int j = 0; j < c->head_dim; j += 16) {
        Packed *record = (Packed *)cell + index_in_cell(c, row->pos, j, value) / (16 * LANES);
        int8_t int8[16];
        quantize((Q8){int8, &record->scale[row->pos % BLOCK]}, x + j, 16, 16);
        for (int i = 0; i < 16; i++)
            record->int8[index_in_cell(c, row->pos, j + i, value) % (16 * LANES)] = int8[i];
    }
}

// Vector i + k of a cell as floats; if packed, i and i + k are in one record, which loops over k
// find once. A lane is a position of keys, or a column of the values of position k % BLOCK.
INLINE VecF cache_load(const float *cell, size_t i, int k, const bool value, const bool packed) {
    const Packed *record = (const Packed *)cell + i / 16;
    if (!packed) return ((const VecF *)cell)[i + k];
    const VecF scale = value ? splat_f(record->scale[k % BLOCK]) : (VecF)load_vector(record->scale);
    return load_bytes(record->int8 + (i % 16 + k) * LANES) * scale;
}

INLINE void cache_prefetch(const float *cell, size_t i, const bool packed) {
    __builtin_prefetch((const char *)cell + i * (packed ? sizeof(Packed) / 16 : sizeof(VecF)));
}

static void cache_copy(const Pass *p, int to, int from) {
    const size_t size = block_size(&p->m->config);
    memmove(p->cache + to * size, p->cache + from * size, size * sizeof(float));
}

// ------------------------------------------------------------------------------------------------
// Threads: all run one function, a job, and meet its loops in one order. A late thread skips the
// loops that are over: nobody waits for it. So its code between two loops may run while others
// write in a later one. There it reads only what is written once in the job (Pass.n_needed), or an
// atomic that is the next loop's count (n_chosen, place): a late thread may take any count.

static int n_threads = 1;
static _Thread_local int thread;     // the number of the thread that reads it, from 0 on
static _Thread_local uint32_t loop;  // the number of the loop that it is in or comes to

static struct {
    _Atomic uint32_t jobs;  // how many have begun + how many have ended: odd while one runs
    Job job;                // that runs. Workers read this and the next two only while jobs is odd
    void *arg;
    uint32_t first;         // the number of its first loop
    _Atomic int active;     // workers that run it, or look whether there is one
    _Atomic uint64_t at;    // the number of the loop that runs << 32 | how many items are taken
    _Atomic int done;       // how many are done
    pthread_mutex_t lock;
    pthread_cond_t changed;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

#define WAIT_UNTIL(ready)                                                                   \
    do { /* spins for 50 us, then sleeps; computes `ready` again and again */               \
        for (double end = now() + 50e-6; !(ready) && now() < end;) {}                       \
        if (ready) break;                                                                   \
        pthread_mutex_lock(&pool.lock);                                                     \
        while (!(ready)) pthread_cond_wait(&pool.changed, &pool.lock);                      \
        pthread_mutex_unlock(&pool.lock);                                                   \
    } while (0)

static void wake_up(void) {  // after a change: no sleeper misses it, because `lock` is held
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.changed);
    pthread_mutex_unlock(&pool.lock);
}

// Ends the slice *s of the loop and takes the next. Returns false when the loop is over. A slice is
// 7/8 of an even share of what is left (guided scheduling): all threads end together.
static bool next_slice(Slice *s, int count, int chunk) {
    const uint64_t next = (uint64_t)(loop + 1) << 32;
    const int did = s->end - s->begin;
    uint64_t at = (uint64_t)loop << 32;
    if (did > 0 && atomic_fetch_add(&pool.done, did) + did == count) {
        atomic_store(&pool.done, 0);
        atomic_store(&pool.at, next);
        wake_up();
    } else if (count == 0 && atomic_compare_exchange_strong(&pool.at, &at, next)) {
        wake_up();  // no items: the first thread that comes ends the loop
    }
    while ((at = atomic_load(&pool.at)) >> 32 == loop) {
        const int taken = (int)at, left = count - taken;
        const int fair = max_int(left * 7 / (8 * n_threads), 1);
        const int size = min_int(round_up(fair, chunk), left);
        *s = (Slice){taken, taken + size};
        if (left == 0) WAIT_UNTIL(atomic_load(&pool.at) >> 32 != loop);
        else if (atomic_compare_exchange_weak(&pool.at, &at, at + size)) return true;
    }
    loop++;
    return false;
}

static void *worker_main(void *arg) {
    thread = (int)(intptr_t)arg;
#ifndef _WIN32  // Ctrl-C is the main thread's alone: it ends read(), or write(), which is repeated
    sigset_t interrupt;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    pthread_sigmask(SIG_BLOCK, &interrupt, NULL);
#endif
    for (uint32_t jobs = 0, before = 0;; before = jobs) {
        WAIT_UNTIL((jobs = atomic_load(&pool.jobs)) % 2 == 1 && jobs != before);
        atomic_fetch_add(&pool.active, 1);
        jobs = atomic_load(&pool.jobs);
        if (jobs % 2 == 1) {  // else it has ended
            loop = pool.first;
            pool.job(pool.arg);
        }
        if (atomic_fetch_sub(&pool.active, 1) == 1) wake_up();
    }
    return NULL;
}

static void start_threads(int count) {
    for (; n_threads < count; n_threads++) {
        pthread_t id;
        if (pthread_create(&id, NULL, worker_main, (void *)(intptr_t)n_threads))
            die("thread %d of %d: too many threads, or no memory for one more (ulimit -d); "
                "-j sets their number", n_threads + 1, count);
    }
}

static void on_all_threads(Job job, void *arg) {
    pool.job = job;
    pool.arg = arg;
    pool.first = loop;
    atomic_fetch_add(&pool.jobs, 1);
    wake_up();
    job(arg);
    atomic_fetch_add(&pool.jobs, 1);
    WAIT_UNTIL(atomic_load(&pool.active) == 0);
    loop = atomic_load(&pool.at) >> 32;  // after Ctrl-C, workers may have gone further
}

// ------------------------------------------------------------------------------------------------
// Workers: what each thread needs to bring the rows of a pass through a layer

// Q8 of several vectors (cols). In memory, each is 4 * stride bytes in one piece: its int8 values,
// its scales, its bias_fix. The pointers are those of vector 0: see from_token.
typedef struct {
    int8_t *int8;       // (cols)
    float *scale;       // (cols / group)
    int32_t *bias_fix;  // (cols / group)  see SIMD primitives
    size_t stride;      // from a vector to the next, in floats
} Quantized;

typedef struct {           // W[r] . x[t] for a range of rows r and n tokens t
    const Matrix *w;       // (rows, cols)
    const Quantized *x;    // (n, cols)
    float *out;            // the result's place: out[t * stride + r - row_begin]
    int stride;
    int row_begin, row_end;
    int n;
    bool add;              // out += instead of out =
    int8_t *unit;          // see unpack_unit
    const int8_t *next;    // what a tile of unpacked weights prefetches: `share` bytes a group
    size_t share;
} Matmul;

// Each thread has one. The pointers above `w` are the same in all.
typedef struct Worker {
    const Config *c;
    Pass *p;
    float *h;          // (batch, dim)         rmsnorm(x); with experts then their outputs' sum
    Quantized h8;      // (batch, dim)         Q8(h)
    float *q;          // (batch, q_dim)       of a delta layer: q, k, v (heads, batch, DELTA_DIM)
    float *a;          // (batch, q_dim)       or (batch, delta_v_dim), like the next two
    float *a_gate;     // (batch, q_dim)       Wg h
    Quantized a8;      // (batch, q_dim)       Q8(a)
    float *decay;      // (batch, delta_v_heads)  g of the delta rule: see rates_of
    float *rate;       // (batch, delta_v_heads)  b
    Quantized gate8;   // (batch * max(used, 1), hidden_dim): see token
    // Which experts run for which tokens. If token 0 chose experts 2 and 5, token 1 experts 5 and
    // 7, token 2 experts 2 and 5, then expert is 2 5 7, token is 0 2  0 1 2  1, place is 0 2 5 6. A
    // model without experts has expert 0 alone, for all tokens. `used`: a token's, shared ones too.
    float *router_out;   // (batch, n_experts)  see choose_experts. n_experts: all_experts()
    float *share;        // (batch, n_experts)
    int *expert;         // (n_experts)      expert[0 .. Pass.n_chosen - 1] are these, ascending
    _Atomic int *place;  // (n_experts + 1)  expert[k]'s rows of gate8: place[k] .. place[k+1] - 1
    int *token;          // (batch * used)       row i of gate8 is that of token[i]
    Quantized chosen8;   // (batch * used, dim)  row i is that of token[i] in h8
    const Layer *w;    // the layer
    int n;             // rows that run
    float *scratch;    // (batch, head_dim or 2 * group_size, whichever is more)
    int8_t *unit;      // (UNIT, cols), and their scales: see unpack_unit
    struct Task *task;
} Worker;

// The pair of this layer and kv head i: see The KV cache
static int pair_of(const Worker *me, int i) { return me->w->number * me->c->n_kv_heads + i; }

// Returns the matrix of head *i of Wk, Wv, Wq and Wg together. *i becomes its number there.
static const Matrix *find_head(const Layer *layer, int width, int *i) {
    const Matrix *const all[] = {&layer->wk, &layer->wv, &layer->wq, &layer->wg}, *const *w = all;
    for (; *i >= (*w)->rows / width; w++) *i -= (*w)->rows / width;
    return *w;
}

static int count_heads(const Layer *layer, int width) {
    return (layer->wq.rows + layer->wk.rows + layer->wv.rows + layer->wg.rows) / width;
}

// A view of x that begins at token t's vector
INLINE Quantized from_token(const Quantized *x, int t) {
    const size_t at = t * x->stride;
    return (Quantized){x->int8 + 4 * at, x->scale + at, x->bias_fix + at, x->stride};
}

// ------------------------------------------------------------------------------------------------
// Matrix products: out = x W^T, as dot_row defines each element. A tile is a strip of rows, one in
// each lane, times TILE_TOKENS tokens; or a panel times 1 to 3. A panel has the weights in the
// order in which a tile needs them. For one token, reading them takes the time. For many, a unit of
// UNIT rows comes from memory once, and stays in the core's caches. Tiles prefetch as they compute:
// packed weights ahead of what they read, else a share of the next unit.

enum { UNIT = 32 };                  // rows that are unpacked at once
enum { STRIP = TILE_VECS * LANES };  // rows of a tile
enum { FEW_VECS = PANEL / LANES };   // of a tile of 1 to 3 tokens: a panel's rows
enum { MOST_VECS = TILE_VECS > (int)FEW_VECS ? TILE_VECS : FEW_VECS };
enum { BYTES_AHEAD = 7232 };         // measured. The CPU's own prefetcher stops at a page's end
_Static_assert(UNIT % STRIP == 0 && UNIT % PANEL == 0 && PANEL % LANES == 0, "whole tiles");
_Static_assert(TILE_TOKENS > 3, "a tile of 1 to 3 tokens is a panel, and not a strip");

// Q8(x), x (n), into columns at .. at + n - 1 of token t's vector in out
static void quantize_token(const Quantized *out, int t, int at, const float *x, int n, int group) {
    const Quantized row = from_token(out, t);
    quantize((Q8){row.int8 + at, row.scale + at / group}, x, n, group);
    for (int g = at / group; W_BIAS != 0 && g < (at + n) / group; g++) {
        int sum = 0;
        for (int i = 0; i < group; i++) sum += row.int8[g * group + i];
        row.bias_fix[g] = -W_BIAS * sum;
    }
}

// Makes weights, ^ FLIP, of LANES words. With 4 bits *high is those of the high nibbles.
INLINE void unpack_words(VecI words, const int bits, VecI levels, VecI *low, VecI *high) {
    if (bits == 8) *low = words ^ splat(FLIP);
    if (bits == 4) *low = pick_levels(levels, words);
    if (bits == 4) *high = pick_levels(levels, words >> 4);
}

INLINE VecI level_table(const int8_t *levels) {  // for pick_levels, ^ FLIP
    VecI table = {0};
    for (size_t i = 0; i < sizeof(table); i += 16) memcpy((char *)&table + i, levels, 16);
    return table ^ splat(FLIP);
}

// Stores values, W[r] . x[t] for LANES rows r from `row` on, or adds them to what is there. Rows
// that do not belong to the part are left out. (Inlined, it would take matmul_tile's registers.)
static __attribute__((noinline)) void put_rows(const Matmul *part, int t, int row, VecF values) {
    float *out = part->out + (size_t)t * part->stride + row - part->row_begin;
    const int begin = max_int(part->row_begin - row, 0), end = min_int(part->row_end - row, LANES);
    if (end - begin == LANES) {
        if (part->add) values = (VecF)load_vector(out) + values;
        memcpy(out, &values, sizeof(values));
        return;
    }
    for (int i = begin; i < end; i++)
        out[i] = part->add ? out[i] + ((float *)&values)[i] : ((float *)&values)[i];
}

// Multiplies `vecs` vectors of rows, from `row` on, with `tokens` tokens from t on. `unpacked`: the
// weights are unpack_unit's. Tokens from n on hold anything (see quantized_init). For a vector of
// rows after the matrix's end, its last vector is computed again. None of this is stored.
INLINE void matmul_tile(const Matmul *part, int t, int row, const int tokens, const int vecs,
                        const int bits, const bool unpacked) {
    const Matrix *w = part->w;
    const int group = w->group_size, n_groups = w->cols / group;
    const size_t x_stride = part->x->stride;
    Quantized x = from_token(part->x, t);
    const VecI levels = bits == 4 ? level_table(w->levels) : splat(0);
    const char *words[MOST_VECS], *scales[MOST_VECS];
    VecF acc[TILE_TOKENS][MOST_VECS];
    UNROLL for (int v = 0; v < vecs; v++) {
        UNROLL for (int i = 0; i < tokens; i++) acc[i][v] = splat_f(0);
        const int r = min_int(row + v * LANES, (w->rows - 1) / LANES * LANES);
        const size_t panel = r / PANEL * PANEL, lane = r % PANEL;
        words[v] = (const char *)w->bytes + panel * w->cols * bits / 8 + lane * 4;
        scales[v] = (const char *)w->scales + (panel * n_groups + lane) * scale_size(bits);
    }
    // The old values of out have left L1: its rows, 4 KB apart in the 0.6B, share a few sets.
    for (int i = 0; part->add && i < tokens && t + i < part->n; i++) {
        const float *out = part->out + (size_t)(t + i) * part->stride + row - part->row_begin;
        __builtin_prefetch(out);
        __builtin_prefetch(out + vecs * LANES - 1);
    }
    for (int g = 0; g < n_groups; g++) {
        for (size_t i = 0; unpacked && i < part->share; i += 64)
            __builtin_prefetch(part->next + g * part->share + i);
        int left = group * bits / 32;  // words of a group, 4 or more (a for is 5 % slower: GCC)
        VecI sum[TILE_TOKENS][MOST_VECS];
        UNROLL for (int i = 0; i < tokens; i++) {
            UNROLL for (int v = 0; v < vecs; v++)
                sum[i][v] = splat(W_BIAS ? x.bias_fix[i * x_stride] : 0);
        }
        do {
            VecI low[MOST_VECS], high[MOST_VECS];
            UNROLL for (int v = 0; v < vecs; v++) {
                low[v] = load_vector(words[v]);
                if (!unpacked) unpack_words(low[v], bits, levels, &low[v], &high[v]);
                if (!unpacked && v * LANES % PANEL == 0)  // a word of 16 rows is a line
                    __builtin_prefetch(words[v] + BYTES_AHEAD, 0, 2);
                words[v] += PANEL * 4;
            }
            UNROLL for (int i = 0; i < tokens; i++) {
                const int8_t *four = x.int8 + i * x_stride * 4;
                const VecI a = splat(load_i32(four)), b = splat(load_i32(four + group / 2));
                UNROLL for (int v = 0; v < vecs; v++) {
                    sum[i][v] = dot4(sum[i][v], low[v], a);
                    if (bits == 4) sum[i][v] = dot4(sum[i][v], high[v], b);
                }
            }
            x.int8 += 4;
        } while (--left);
        UNROLL for (int v = 0; v < vecs; v++) {
            const VecF scale = bits == 8 ? (VecF)load_vector(scales[v])
                                         : load_halves((const uint16_t *)scales[v]);
            if (!unpacked) __builtin_prefetch(scales[v] + BYTES_AHEAD / 16);
            UNROLL for (int i = 0; i < tokens; i++) {
                const VecF term = __builtin_convertvector(sum[i][v], VecF) * scale;
                acc[i][v] = mul_add_v(term, splat_f(x.scale[i * x_stride]), acc[i][v]);
            }
            scales[v] += PANEL * scale_size(bits);
        }
        x.int8 += bits == 4 ? group / 2 : 0;  // the high nibbles'
        x.scale++;
        x.bias_fix++;
    }
    UNROLL for (int i = 0; i < tokens; i++) {
        for (int v = 0; v < vecs && t + i < part->n; v++)
            put_rows(part, t + i, row + v * LANES, acc[i][v]);
    }
}

// A unit of rows and few tokens. For 1 to 3 a tile is a panel, so memory is read front to back.
INLINE void matmul_few(const Matmul *part, int row, int end, const int bits) {
    const int n = part->n, step = n > 3 ? STRIP : (int)PANEL;
    for (; row < end; row += step) {
        if (n == 1) matmul_tile(part, 0, row, 1, FEW_VECS, bits, false);
        else if (n == 2) matmul_tile(part, 0, row, 2, FEW_VECS, bits, false);
        else if (n == 3) matmul_tile(part, 0, row, 3, FEW_VECS, bits, false);
        else for (int t = 0; t < n; t += TILE_TOKENS)
            matmul_tile(part, t, row, TILE_TOKENS, TILE_VECS, bits, false);
    }
}

// The unit of rows from `row` on, a multiple of PANEL, as a matrix of 8 bits, ^ FLIP: for many
// tokens, this is done once. Its groups are those of the unit's panels, one after the other.
static Matrix unpack_unit(const Matrix *w, int row, int8_t *at) {
    const int n_groups = w->cols / w->group_size, bits = w->bits;
    Matrix unit = {.rows = min_int(UNIT, round_up(w->rows - row, PANEL)), .cols = w->cols,
                   .group_size = w->group_size, .bits = 8,
                   .bytes = w->bytes + (size_t)row * w->cols * bits / 8,
                   .scales = (const char *)w->scales + (size_t)row * n_groups * scale_size(bits)};
    const int groups = unit.rows / PANEL * n_groups;
    const int vectors = w->group_size * bits / 32 * PANEL / LANES;  // of a group of a panel's rows
    const int8_t *from = unit.bytes;
    const VecI levels = bits == 4 ? level_table(w->levels) : splat(0);
    VecI *to = (VecI *)at;
    VecF *scales = (VecF *)(at + UNIT * w->cols);
    if (bits == 8 && W_BIAS == 0) return unit;
    unit.bytes = at;
    for (int g = 0; g < groups; g++) {
        for (int i = 0; i < vectors; i++, to++, from += sizeof(VecI))
            unpack_words(load_vector(from), bits, levels, to, to + vectors);
        if (bits == 4) to += vectors;  // past the high nibbles'
    }
    if (bits == 8) return unit;
    for (int i = 0; i < groups * PANEL / LANES; i++)
        scales[i] = load_halves((const uint16_t *)unit.scales + i * LANES);
    unit.scales = scales;
    return unit;
}

// A unit of rows and many tokens. Each group of each tile prefetches some lines of the next unit
// (harmless at the end): all at once would wait for memory.
static void matmul_unit(const Matmul *part, int row, int end) {
    const Matrix *w = part->w, unit = unpack_unit(w, row, part->unit);
    const size_t row_bytes = (size_t)w->cols * w->bits / 8, n_groups = w->cols / w->group_size;
    Matmul all = *part;
    all.w = &unit;
    all.row_begin -= row;  // < 0 in all units but the part's first
    all.row_end = end - row;
    all.next = w->bytes + (row + UNIT) * row_bytes;
    const size_t groups = (part->n + TILE_TOKENS - 1) / TILE_TOKENS * n_groups;  // of a strip
    all.share = (STRIP * row_bytes + groups - 1) / groups;
    for (int r = 0; r < all.row_end; r += STRIP) {
        for (int t = 0; t < part->n; t += TILE_TOKENS, all.next += all.share * n_groups)
            matmul_tile(&all, t, r, TILE_TOKENS, TILE_VECS, 8, true);
    }
}

// out[t * stride + i] = W[row + i] . x[t] for i < rows and t < n; with `add`, += instead of =.
// Unpacking a unit pays from four tiles of tokens on; where 8 bits need none, from two on.
static void multiply(const Worker *me, float *out, int stride, const Matrix *w, int row, int rows,
                     const Quantized *x, int n, bool add) {
    const Matmul part = {.w = w, .x = x, .out = out, .stride = stride, .row_begin = row,
                         .row_end = row + rows, .n = n, .add = add, .unit = me->unit};
    for (int r = row / PANEL * PANEL; n > 0 && r < row + rows; r += UNIT) {
        const int end = min_int(r + UNIT, row + rows);
        if (n > (W_BIAS ? 3 : 1) * TILE_TOKENS) matmul_unit(&part, r, end);
        else if (w->bits == 8) matmul_few(&part, r, end, 8);
        else matmul_few(&part, r, end, 4);
    }
}

// y = W x, or y += W x, for all n tokens: x (n, cols), y (n, w->rows)
static void matmul_all(const Worker *me, float *y, const Matrix *w, const Quantized *x, bool add) {
    SLICES (s, (w->rows + UNIT - 1) / UNIT, 1) {
        const int begin = s.begin * UNIT, rows = min_int(s.end * UNIT, w->rows) - begin;
        multiply(me, y + begin, w->rows, w, begin, rows, x, me->n, add);
    }
}

// ------------------------------------------------------------------------------------------------
// Attention. A query is one query head of one row. It goes through the positions in spans and keeps
// the scores of one span only, as attend() does, and as in FlashAttention (arXiv 2205.14135).
// The queries of a kv head are those of all query heads that share it, row by row. A task is up to
// ATT_TASK of them, all of one text, so that a span's keys and values (256 KB if head_dim is 128)
// come to L2 once. A tile has ATT_QUERIES of them (fewer if a task has few) and two vectors, of
// positions for the scores, of columns for the values. Its sums stay in registers.
//
// With a cache of 8 bits, a task of few queries reads packed cells: one token alone waits for
// memory. For more (prompts are bound by arithmetic) each span is first unpacked.
enum { ATT_TASK = 96, SCORE_STRIDE = SPAN + LANES };  // rows whole KBs apart would share L1 sets
_Static_assert(SPAN % 32 == 0 && ATT_TASK % ATT_QUERIES == 0 && (int)BLOCK == LANES, "whole tiles");

typedef struct Task {
    const Config *c;
    float *score;            // (ATT_TASK, SCORE_STRIDE)  of the span, then the terms
    float *q;                // (head_dim, ATT_TASK)      transposed: a tile's are neighbours
    float *sum;              // (ATT_TASK, value_dim)     of the terms times the values, so far
    float *unpacked;         // (SPAN, head_dim + value_dim)  with 8 bits: room for a span as floats
    int n;                   // queries, rounded up to whole tiles: the last one is repeated
    int start, end;          // the span: positions start .. end - 1, start a multiple of SPAN
    const float *cell[SPAN / BLOCK];  // those of the span
    float *out[ATT_TASK];    // (head_dim)                each query's place in Worker.a
    int len[ATT_TASK];       // positions that each query sees, its own and those before; ascending
    float largest[ATT_TASK]; // the largest score so far
    float total[ATT_TASK];   // the sum of the terms
    float keep[ATT_TASK];    // the factor on what was summed before
} Task;

// The cell of position pos. After the span, its last cell.
INLINE const float *cell_of(const Task *task, int pos) {
    return task->cell[(unsigned)(min_int(pos, task->end - 1) - task->start) / BLOCK];
}

static void unpack_cells(Task *task) {
    const size_t keys = task->c->head_dim, vectors = keys + value_dim(task->c);
    VecF *out = (VecF *)task->unpacked;
    for (int pos = task->start; pos < task->end; pos += BLOCK, out += vectors) {
        const float *cell = cell_of(task, pos), *later = cell_of(task, pos + 2 * BLOCK);
        for (size_t i = 0; i < vectors; i += 16) {
            for (int k = 0; k < 16; k++) {
                cache_prefetch(later, i + k, true);
                out[i + k] = cache_load(cell, i, k, i >= keys, true);
            }
        }
        task->cell[(pos - task->start) / BLOCK] = (float *)out;
    }
}

// score = q . k / sqrt(head_dim), for `queries` queries from r on and two cells of positions from
// pos on; those after the span's end are overwritten or not read. The CPU can't foresee where the
// next two cells are, so the first tile prefetches them for all.
INLINE void score_tile(const Task *task, int r, int pos, const int queries, const bool packed) {
    const int head_dim = task->c->head_dim, step = packed ? 16 : head_dim;
    const float scale = 1 / sqrtf((float)head_dim), *q = task->q + r;
    VecF *score = (VecF *)(task->score + r * SCORE_STRIDE + pos - task->start);
    VecF sum[ATT_QUERIES][2] = {0};
    const float *keys[4];
    UNROLL for (int i = 0; i < 4; i++) keys[i] = cell_of(task, pos + i * BLOCK);
    for (int j = 0; j < head_dim; j += step) {
        for (int k = 0; k < step; k++, q += ATT_TASK) {
            VecF key[2];
            for (int v = 2; v < 4 && r == 0; v++) cache_prefetch(keys[v], j + k, packed);
            UNROLL for (int v = 0; v < 2; v++) key[v] = cache_load(keys[v], j, k, false, packed);
            UNROLL for (int i = 0; i < queries; i++) {
                UNROLL for (int v = 0; v < 2; v++)
                    sum[i][v] = mul_add_v(key[v], splat_f(q[i]), sum[i][v]);
            }
        }
    }
    UNROLL for (int i = 0; i < queries; i++, score += SCORE_STRIDE / LANES) {
        UNROLL for (int v = 0; v < 2; v++) score[v] = sum[i][v] * scale;
    }
}

// sum = keep * sum + (the span's terms times values), for `queries` queries from r on and two
// vectors of columns from vector j on. From where the first query stops, each one takes only its
// own positions: its term of a later one is 0, but 0 times infinity or NaN is NaN.
INLINE void value_tile(const Task *task, int r, int j, const int queries, const bool packed) {
    const size_t first = task->c->head_dim + j * BLOCK;
    const int *len = task->len + r, end = min_int(task->end, len[queries - 1]);
    const int common = max_int(min_int(task->end, len[0]), task->start);
    const float *term = task->score + r * SCORE_STRIDE;
    VecF sum[ATT_QUERIES][2] = {0};
    for (int pos = task->start; pos < common; pos += BLOCK) {
        const float *cell = cell_of(task, pos), *later = cell_of(task, pos + 2 * BLOCK);
        for (int k = 0; k < min_int(BLOCK, common - pos); k++, term++) {
            VecF value[2];
            UNROLL for (int v = 0; v < 2; v++) {
                if (r == 0) cache_prefetch(later, first + v * BLOCK + k, packed);
                value[v] = cache_load(cell, first + v * BLOCK, k, true, packed);
            }
            UNROLL for (int i = 0; i < queries; i++) {
                const VecF weight = splat_f(term[i * SCORE_STRIDE]);
                UNROLL for (int v = 0; v < 2; v++)
                    sum[i][v] = mul_add_v(value[v], weight, sum[i][v]);
            }
        }
    }
    for (int pos = common; pos < end; pos++, term++) {
        const float *cell = cell_of(task, pos);
        UNROLL for (int i = 0; i < queries; i++) {
            const VecF weight = splat_f(term[i * SCORE_STRIDE]);
            if (pos >= len[i]) continue;
            UNROLL for (int v = 0; v < 2; v++) {
                const VecF value = cache_load(cell, first + v * BLOCK, pos % BLOCK, true, packed);
                sum[i][v] = mul_add_v(value, weight, sum[i][v]);
            }
        }
    }
    UNROLL for (int i = 0; i < queries; i++) {
        VecF *out = (VecF *)(task->sum + (r + i) * value_dim(task->c)) + j;
        const VecF keep = splat_f(task->keep[r + i]);
        UNROLL for (int v = 0; v < 2; v++) out[v] = mul_add_v(out[v], keep, sum[i][v]);
    }
}

// Each query's scores become the terms exp(score - largest). Positions after its own get -INFINITY,
// so that their terms are 0 (causal), up to a multiple of 16: sum_of is slow with a rest. `largest`
// is never -INFINITY, even if all scores are: -INFINITY - -INFINITY would be NaN.
static void span_softmax(Task *task) {
    const int width = round_up(task->end - task->start, 16);
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

// `queries` and `packed` are constants. A tile of scores that sees no position is left out.
INLINE void attend_span(Task *task, const int queries, const bool packed) {
    for (int pos = task->start; pos < task->end; pos += 2 * BLOCK) {
        for (int r = 0; r < task->n; r += queries)
            if (pos < task->len[r + queries - 1]) score_tile(task, r, pos, queries, packed);
    }
    span_softmax(task);
    for (int j = 0; j < value_dim(task->c) / LANES; j += 2) {
        for (int r = 0; r < task->n; r += queries) value_tile(task, r, j, queries, packed);
    }
}

// Attention of queries first .. first + count - 1 of a kv head, all of the text with these blocks
static void attend_task(const Worker *me, int kv_head, const int *blocks, int first, int count) {
    const Config *c = me->c;
    const int per_kv = c->n_heads / c->n_kv_heads;
    const bool packed = c->cache_bits == 8 && count <= max_int(ATT_QUERIES, 8);
    const bool four = packed && count > 2 && round_up(count, 4) < round_up(count, ATT_QUERIES);
    const int queries = four ? 4 : 2 * count <= ATT_QUERIES ? 2 : ATT_QUERIES;  // of a tile
    Task *task = me->task;
    task->n = round_up(count, queries);
    memset(task->sum, 0, (size_t)task->n * value_dim(c) * sizeof(float));
    for (int r = 0; r < task->n; r++) {
        const int query = first + min_int(r, count - 1), t = query / per_kv;
        const int head = kv_head * per_kv + query % per_kv;
        const size_t at = (size_t)t * c->q_dim + head * c->head_dim;
        for (int j = 0; j < c->head_dim; j++) task->q[j * ATT_TASK + r] = me->q[at + j];
        task->out[r] = me->a + at;
        task->len[r] = me->p->rows[t].pos + 1;
        task->largest[r] = -FLT_MAX;
        task->total[r] = 0;
    }
    for (task->end = 0; task->end < task->len[task->n - 1];) {
        task->start = task->end;
        task->end = min_int(task->start + SPAN, task->len[task->n - 1]);
        for (int i = 0, pos = task->start; pos < task->end; i++, pos += BLOCK)
            task->cell[i] = cache_cell(me->p, pair_of(me, kv_head), blocks, pos);
        if (c->cache_bits == 8 && !packed) unpack_cells(task);
        if (packed && queries == 2) attend_span(task, 2, true);
        else if (packed && queries == 4) attend_span(task, 4, true);
        else if (packed) attend_span(task, ATT_QUERIES, true);
        else if (queries == 2) attend_span(task, 2, false);
        else attend_span(task, ATT_QUERIES, false);
    }
    for (int r = 0; r < count; r++) {
        const float *sum = task->sum + r * value_dim(c), inverse = 1 / task->total[r];
        float *a = task->out[r];  // GCC does not vectorize a loop over task->out[r][j]
        for (int j = 0; j < c->head_dim; j++) a[j] = sum[j] * inverse;
    }
}

// attend() for all query heads of all rows. Query i of all is query i % n of kv head i / n. A slice
// has at least as many queries as a row and as a tile have, if there are as many.
static void attend_all(const Worker *me) {
    const Row *rows = me->p->rows;
    const int per_kv = me->c->n_heads / me->c->n_kv_heads, n = me->n * per_kv;
    SLICES (s, n * me->c->n_kv_heads, min_int(n, round_up(per_kv, ATT_QUERIES))) {
        for (int i = s.begin, count; i < s.end; i += count) {
            const int first = i % n, most = min_int(min_int(s.end - i, n - first), ATT_TASK);
            const int *blocks = rows[first / per_kv].blocks;
            for (count = 1; count < most && rows[(first + count) / per_kv].blocks == blocks;)
                count++;
            attend_task(me, i / n, blocks, first, count);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// The delta rule. It goes token by token, as in Part I: chunks of tokens would have other bits. The
// columns of S do not need each other. So a thread takes some of them and goes through all rows,
// and a text's stay in its L1 cache. In a state S is (DELTA_DIM / COLUMNS, DELTA_DIM, COLUMNS).
enum { COLUMNS = 4 * LANES };
_Static_assert(DELTA_DIM % COLUMNS == 0, "whole blocks of columns");

// Part `at` (n) of a row's state, before the row
static float *take_state(const Row *row, size_t at, size_t n) {
    if (row->pos == 0) memset(row->state + at, 0, n * sizeof(float));
    return row->state + at;
}

static void save_state(const Row *row, size_t at, size_t n) {
    if (row->saved) memcpy(row->saved + at, row->state + at, n * sizeof(float));
}

// Head i of all of a delta layer, for all rows: see find_head. q, k and v are convolved while they
// are in the CPU's caches. With a head of the gate come the rates of the value head.
static void run_delta_head(const Worker *me, int i) {
    const Config *c = me->c;
    const Layer *layer = me->w;
    const Matrix *w = find_head(layer, DELTA_DIM, &i);
    const bool q = w == &layer->wq, k = w == &layer->wk, gate = w == &layer->wg;
    const size_t head = q ? i : k ? c->delta_k_heads + i : 2 * c->delta_k_heads + i;
    const size_t at = head * DELTA_DIM, stride = gate ? c->delta_v_dim : DELTA_DIM;
    const size_t past = layer->number * layer_state(c) + DELTA_DIM * c->delta_v_dim + PAST * at;
    float *u = gate ? me->a_gate + i * DELTA_DIM : me->q + at * me->p->batch;
    multiply(me, u, stride, w, i * DELTA_DIM, DELTA_DIM, &me->h8, me->n, false);
    for (int t = 0; t < me->n && gate; t++) {
        const size_t to = t * c->delta_v_heads + i;
        rates_of(layer, me->h + (size_t)t * c->dim, c->dim, i, &me->decay[to], &me->rate[to]);
    }
    for (int t = 0; t < me->n && !gate; t++, u += DELTA_DIM) {
        const Row *row = &me->p->rows[t];
        convolve(u, take_state(row, past, PAST * DELTA_DIM), layer->conv + at, c->delta_dim);
        save_state(row, past, PAST * DELTA_DIM);
        if (q || k) make_unit(u, q ? 1 / sqrtf(DELTA_DIM) : 1);
    }
}

// learn() for the columns from `at` on, of those of all value heads' S, for all rows
static void learn_columns(const Worker *me, size_t at) {
    const Config *c = me->c;
    const size_t size = (size_t)me->p->batch * DELTA_DIM, head = at / DELTA_DIM;
    const size_t S_at = me->w->number * layer_state(c) + at * DELTA_DIM, n = COLUMNS * DELTA_DIM;
    const float *q = me->q + head / (c->delta_v_heads / c->delta_k_heads) * size;
    const float *k = q + c->delta_k_heads * size;
    const float *v = me->q + (2 * c->delta_k_heads + head) * size + at % DELTA_DIM;
    for (int t = 0; t < me->n; t++, q += DELTA_DIM, k += DELTA_DIM, v += DELTA_DIM) {
        const size_t rates = t * c->delta_v_heads + head;
        float *S = take_state(&me->p->rows[t], S_at, n), *a = me->a + (size_t)t * c->delta_v_dim;
        learn(S, q, k, v, me->decay[rates], me->rate[rates], a + at, COLUMNS);
        save_state(&me->p->rows[t], S_at, n);
    }
}

// ------------------------------------------------------------------------------------------------
// The work of a layer, for all rows: the bits of run_layer(), because each sum has its order. For a
// head, SwiGLU or an expert, a thread multiplies some rows of a matrix with all vectors of a pass,
// so that weights are read once, and goes on with the result while it is in its caches.

// h = rmsnorm(x, w), h8 = Q8(h)
static void norm_all(const Worker *me, const float *w) {
    const int dim = me->c->dim;
    EACH (t, me->n, 4) {
        float *h = me->h + (size_t)t * dim;
        rmsnorm(h, me->p->x + (size_t)t * dim, w, dim, me->c->rms_norm_eps);
        quantize_token(&me->h8, t, 0, h, dim, me->c->group_size);
    }
}

// Head i of all of attention, for all rows: see find_head. Keys and values go to the KV cache.
static void run_head(const Worker *me, int i) {
    const Config *c = me->c;
    const int head_dim = c->head_dim;
    const Matrix *w = find_head(me->w, head_dim, &i);
    const bool q = w == &me->w->wq, k = w == &me->w->wk, v = w == &me->w->wv, cached = k || v;
    const size_t half = c->rotary_dim / 2, at = i * head_dim, stride = cached ? head_dim : c->q_dim;
    const float *bias = q ? me->w->bq : k ? me->w->bk : v ? me->w->bv : NULL;
    float *out = cached ? me->scratch : (q ? me->q : me->a_gate) + at;
    multiply(me, out, stride, w, at, head_dim, &me->h8, me->n, false);
    for (int t = 0; t < me->n; t++, out += stride) {
        const float *cos = me->p->cos + t * half, *sin = me->p->sin + t * half;
        if (bias) add(out, bias + at, head_dim);
        if (q || k) norm_and_rope(c, out, k ? me->w->k_norm : me->w->q_norm, cos, sin);
        for (int j = 0; k && bias && c->cache_bits == 8 && j < head_dim; j++)
            out[j] -= bias[at + j];
        if (cached) cache_store(me->p, pair_of(me, i), &me->p->rows[t], out, v);
    }
}

// Other tokens read a token only through its k and v. So in the last layer only needed rows go on
// after these are stored: they move to the front of all that is read later: rows, x, q, a_gate.
static void keep_needed(const Worker *me) {
    const size_t dim = me->c->dim, q_dim = me->c->q_dim;
    size_t to = 0;
    for (int t = 0; t < me->n; t++) {
        if (!me->p->rows[t].needed) continue;
        me->p->rows[to] = me->p->rows[t];
        memmove(me->p->x + to * dim, me->p->x + t * dim, dim * sizeof(float));
        memmove(me->q + to * q_dim, me->q + t * q_dim, q_dim * sizeof(float));
        memmove(me->a_gate + to * q_dim, me->a_gate + t * q_dim, me->w->wg.rows * sizeof(float));
        to++;
    }
    me->p->n_needed = (int)to;
}

// gate8 = Q8(silu(W1 h8) * (W3 h8)). Item i is group i % n_groups of the rows of gate8 that belong
// to expert[i / n_groups]. `scratch` has W1 h and W3 h of this group.
static void swiglu_all(const Worker *me) {
    const int group = me->c->group_size, n_groups = me->c->hidden_dim / group;
    EACH (i, me->p->n_chosen * n_groups, 1) {
        const int k = i / n_groups, g = i % n_groups, place = me->place[k];
        const int n = me->w->router ? me->place[k + 1] - place : me->n;
        const int row = (me->expert[k] * n_groups + g) * group;
        const Quantized x = from_token(&me->chosen8, place);
        float *gate = me->scratch, *up = gate + n * group;
        multiply(me, gate, group, &me->w->w1, row, group, &x, n, false);
        multiply(me, up, group, &me->w->w3, row, group, &x, n, false);
        for (int t = 0; t < n; t++, gate += group, up += group) {
            silu_times(gate, up, group);
            quantize_token(&me->gate8, place + t, g * group, gate, group, group);
        }
    }
}

// Lists the tokens that chose each expert.
static void route(const Worker *me) {
    const int n_experts = all_experts(me->c);
    int k = 0;  // and place[0] stays 0
    for (int e = 0, n = 0; e < n_experts; e++) {
        for (int t = 0; t < me->n; t++) {
            if (me->share[(size_t)t * n_experts + e] != 0) me->token[n++] = t;
        }
        if (n == me->place[k]) continue;  // nobody chose e
        me->expert[k++] = e;
        me->place[k] = n;
    }
    me->p->n_chosen = k;
}

// Adds the experts' outputs to the group from `at` on of each token's x. One call adds all experts
// to an element, in ascending order, so that the result does not depend on the threads.
static void add_outputs(const Worker *me, int at) {
    const int dim = me->c->dim, group = me->c->group_size;
    for (int k = 0; k < me->p->n_chosen; k++) {
        const int e = me->expert[k], place = me->place[k], n = me->place[k + 1] - place;
        const Quantized gate8 = from_token(&me->gate8, place);
        float *out = me->scratch;
        multiply(me, out, group, &me->w->w2, e * dim + at, group, &gate8, n, false);
        for (int j = 0; j < n; j++, out += group) {
            const int t = me->token[place + j];
            const float share = me->share[(size_t)t * all_experts(me->c) + e];
            float *sum = me->h + (size_t)t * dim + at;
            for (int i = 0; i < group; i++) sum[i] += share * out[i];
        }
    }
    for (size_t i = at; i < (size_t)me->n * dim; i += dim) add(me->p->x + i, me->h + i, group);
}

// Chooses each token's experts, and brings what these need.
static void choose_all(const Worker *me) {
    const int dim = me->c->dim, n_experts = all_experts(me->c);
    EACH (i, me->n * n_experts, 8) {
        const float *h = me->h + (size_t)(i / n_experts) * dim;
        me->router_out[i] = dot_of(me->w->router + (size_t)(i % n_experts) * dim, h, dim);
    }
    EACH (t, me->n, 4) {  // nobody needs h any more: it becomes the sum of the experts' outputs
        const size_t at = (size_t)t * n_experts;
        float *h = me->h + (size_t)t * dim;
        memset(h, 0, dim * sizeof(float));
        if (!choose_experts(me->c, me->router_out + at, me->share + at)) h[0] = NAN;
    }
    EACH (once, 1, 1) route(me);  // one thread alone
    EACH (i, me->place[atomic_load(&me->p->n_chosen)], 16) {  // a vector: int8, scales, bias_fix
        const Quantized from = from_token(&me->h8, me->token[i]), to = from_token(&me->chosen8, i);
        memcpy(to.int8, from.int8, to.stride * 4);
    }
}

static void attention_all(Worker *me) {
    EACH (i, count_heads(me->w, me->c->head_dim), 1) run_head(me, i);
    if (me->w == &me->p->m->weights.layers[me->c->n_layers - 1]) {
        EACH (once, 1, 1) keep_needed(me);
        me->n = me->p->n_needed;
    }
    attend_all(me);
}

static void layer_all(Worker *me) {
    const Layer *w = me->w;
    const int n = w->wo.cols, gates = w->conv ? 0 : w->wg.rows;  // of attention
    const int group = me->c->group_size;
    norm_all(me, w->rms_att);
    if (w->conv) EACH (i, count_heads(w, DELTA_DIM), 1) run_delta_head(me, i);
    if (w->conv) EACH (i, n / COLUMNS, 1) learn_columns(me, i * COLUMNS);
    else attention_all(me);
    EACH (t, me->n, 1) {  // the gate, and a8 = Q8(a)
        float *a = me->a + (size_t)t * n, *g = me->a_gate + (size_t)t * n;
        for (int i = 0; w->conv && i < n; i += DELTA_DIM) norm_and_gate(me->c, w, a + i, g + i);
        for (int i = 0; i < gates; i++) a[i] *= sigmoid(g[i]);
        quantize_token(&me->a8, t, 0, a, n, group);
    }
    matmul_all(me, me->p->x, &w->wo, &me->a8, true);
    norm_all(me, w->rms_ffn);
    if (w->router) choose_all(me);
    swiglu_all(me);
    if (w->router) EACH (g, me->c->dim / group, 1) add_outputs(me, g * group);
    else matmul_all(me, me->p->x, &w->w2, &me->gate8, true);
}

static void forward_job(void *pass) {
    Pass *p = pass;
    Worker *me = &p->workers[thread];
    const size_t half = me->c->rotary_dim / 2;
    me->n = p->n;
    EACH (t, me->n, 1) {
        embed(p->m, p->rows[t].token, p->x + (size_t)t * me->c->dim);
        rope_angles(me->c, p->rows[t].pos, p->cos + t * half, p->sin + t * half);
    }
    for (int l = 0; l < me->c->n_layers && !interrupted; l++) {
        me->w = &p->m->weights.layers[l];
        layer_all(me);
        if (thread == 0) progress_add(p->n, me->c->n_layers);
    }
}

static bool forward_rows(Pass *p, int n) {
    p->n = n;
    on_all_threads(forward_job, p);
    return !interrupted;
}

static void classify_job(void *pass) {
    const Pass *p = pass;
    Worker *me = &p->workers[thread];
    me->n = p->n;
    norm_all(me, p->m->weights.rms_final);
    matmul_all(me, p->logits, &p->m->weights.classifier, &me->h8, false);
}

static float *classify(Pass *p, int n) {
    p->n = n;
    on_all_threads(classify_job, p);
    return p->logits;
}
#endif  // not PLAIN

// ------------------------------------------------------------------------------------------------
// The memory of a run: what Part III needs for a pass is allocated here, once

static const char *version(void) { return "qwen3 " VERSION " (" SIMD ")\n"; }

// Returns what alloc says if it can't get `size` bytes for the cache: contexts of one text that fit
// into size / 2, a quarter of the memory, and what malloc gives (ulimit -v counts the file, too).
static const char *no_cache(const Config *c, int texts, double size) {
    double room = fmin(size / 2, memory_size() / 4);
    void *volatile probe;  // volatile: else a compiler may leave it out
    while (!(probe = malloc((size_t)(room * 1.25))) && room > 1e6) room *= 0.75;
    free(probe);
    Config packed = *c;
    packed.cache_bits = 8;
    return say("the KV cache (%s-c %.0f fits, or with -C 8 -c %.0f)", texts > 1 ? "-b 1 " : "",
               floor(fmin(room / position_size(c), c->max_seq_len)),
               floor(fmin(room / position_size(&packed), c->max_seq_len)));
}

static void *activations(size_t count, size_t size) {
    return alloc(count, size, "the activations (-b makes them smaller)");
}

static float *floats(size_t count) { return activations(count, sizeof(float)); }

static Q8 q8_init(int cols, int group) { return (Q8){activations(cols, 1), floats(cols / group)}; }

static void state_init(Model *m) {
    const Config *c = &m->config;
    State *s = &m->state;
    const int group = c->group_size, half = c->rotary_dim / 2, context = m->context;
    const size_t size = (size_t)c->n_kv_layers * c->kv_dim * sizeof(float);
    const int a_dim = max_int(c->q_dim, c->delta_v_dim), experts = all_experts(c);
    const char *cache = no_cache(c, 1, 2.0 * context * size);
    *s = (State){.x = floats(c->dim), .cos = floats(half), .sin = floats(half), .h = floats(c->dim),
                 .h8 = q8_init(c->dim, group), .q = floats(max_int(c->q_dim, c->delta_dim)),
                 .a = floats(a_dim), .a_gate = floats(a_dim), .a8 = q8_init(a_dim, group),
                 .gate = floats(c->hidden_dim), .up = floats(c->hidden_dim),
                 .gate8 = q8_init(c->hidden_dim, group), .router_out = floats(experts),
                 .share = floats(experts), .y = floats(c->dim), .out = floats(c->dim),
                 .logits = floats(c->vocab_size), .delta = floats(state_size(c)),
                 .keys = alloc(context, size, cache), .values = alloc(context, size, cache)};
}

#ifndef PLAIN
static int most_blocks = INT_MAX;  // tests make it small

// The blocks of `texts` texts, but at most a quarter of the memory, and at least those of one text
static int pool_blocks(const Config *c, int context, int texts) {
    const double room = memory_size() / 4 / position_size(c) / BLOCK;
    const double one = (context + BLOCK - 1) / BLOCK;
    return (int)fmin(one * texts, fmax(one, fmin(room, most_blocks)));
}

// Spare rows follow, because the last tile of a product may read past the n rows.
static Quantized quantized_init(size_t n, int cols, int group) {
    const size_t words = cols / 4, n_groups = cols / group;
    const size_t stride = (words + 2 * n_groups + 15) / 16 * 16;  // rows are aligned to 64 bytes
    int32_t *p = activations((n + TILE_TOKENS) * stride, sizeof(*p));
    return (Quantized){(int8_t *)p, (float *)p + words, p + words + n_groups, stride};
}

static Pass *pass_init(const Model *m, int batch, int logit_rows, int texts) {
    const Config *c = &m->config;
    const int a_dim = max_int(c->q_dim, c->delta_v_dim);
    const int widest = max_int(max_int(c->dim, a_dim), c->hidden_dim);  // cols of any matrix
    const int n_experts = max_int(all_experts(c), 1), group = c->group_size;
    const int n_blocks = pool_blocks(c, m->context, texts);
    const size_t n = batch, half = c->rotary_dim / 2;
    const size_t chosen = n * max_int(c->n_experts_used + c->shared_expert, 1);
    const size_t cache = block_size(c) * sizeof(float);
    Pass *p = activations(1, sizeof(Pass));
    const Quantized h8 = quantized_init(n, c->dim, group);
    const Worker shared = {.c = c, .p = p, .h = floats(n * c->dim), .h8 = h8,
                     .q = floats(n * max_int(c->q_dim, c->delta_dim)), .a = floats(n * a_dim),
                     .a_gate = floats(n * a_dim), .a8 = quantized_init(n, a_dim, group),
                     .decay = floats(n * c->delta_v_heads), .rate = floats(n * c->delta_v_heads),
                     .gate8 = quantized_init(chosen, c->hidden_dim, group),
                     .router_out = floats(n * n_experts), .share = floats(n * n_experts),
                     .expert = activations(n_experts, sizeof(int)),
                     .place = activations(n_experts + 1, sizeof(int)),
                     .token = activations(chosen, sizeof(int)),
                     .chosen8 = c->n_experts ? quantized_init(chosen, c->dim, group) : h8};
    *p = (Pass){.m = m, .batch = batch, .logit_rows = logit_rows, .n_blocks = n_blocks,
                .block_len = BLOCK, .rows = activations(n, sizeof(Row)), .draft_rows = TILE_TOKENS,
                .cache = alloc(n_blocks, cache, no_cache(c, texts, n_blocks * (double)cache)),
                .cos = floats(n * half), .sin = floats(n * half), .x = floats(n * c->dim),
                .n_chosen = 1, .logits = floats((size_t)logit_rows * c->vocab_size),
                .workers = activations(n_threads, sizeof(Worker))};
    for (int i = 0; i < n_threads; i++) {
        Worker *own = &p->workers[i];
        *own = shared;
        own->scratch = floats(n * max_int(c->head_dim, 2 * group));
        own->unit = activations(UNIT, widest + widest / group * sizeof(float));
        own->task = activations(1, sizeof(Task));
        *own->task = (Task){.c = c, .score = floats(ATT_TASK * SCORE_STRIDE),
                            .q = floats(ATT_TASK * c->head_dim),
                            .sum = floats(ATT_TASK * value_dim(c)),
                            .unpacked = floats(SPAN * (c->head_dim + value_dim(c)))};
    }
    return p;
}

// Four hashes, each of every fourth word (u64): none waits for the products of the others.
static uint64_t hash_of(uint64_t seed, const void *bytes, size_t n) {
    const uint64_t factor = 0x9E3779B97F4A7C15u;
    uint64_t hash[4] = {n, 1, 2, 3}, word[4] = {0};
    for (const char *p = bytes, *end = p + n; p < end; p += sizeof(word)) {
        if (end - p >= (ptrdiff_t)sizeof(word)) memcpy(word, p, sizeof(word));
        else memcpy(word, p, end - p);
        UNROLL for (int i = 0; i < 4; i++) hash[i] = (hash[i] ^ word[i]) * factor;
        UNROLL for (int i = 0; i < 4; i++) hash[i] ^= hash[i] >> 32;
    }
    for (int i = 0; i < 4; i++) seed = (seed ^ seed >> 32 ^ hash[i]) * factor;
    return seed | 1;  // not 0
}
#endif

// ------------------------------------------------------------------------------------------------
// POSIX and Windows: what differs between systems

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// Ctrl-C stops an answer, or a conversation that waits for a message; while `patience` is -1, it
// ends the program. So does another if the first had no effect for `patience` seconds.
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
#define poll(...) 1
#define realpath(...) NULL
#define ioctl(fd, request, n) !PeekNamedPipe(handle(fd), NULL, 0, NULL, (DWORD *)(n), NULL)
#define mmap(at, size, protection, flags, fd, offset) map_file(fd)
#define open(path, flags, mode) _wopen(wide(path), (flags) | _O_BINARY, (mode) & 0600)
#define stat_file(path, st) _wstat64(wide(path), (void *)(st))  // of the same layout
#define isatty(fd) GetConsoleMode(handle(fd), &(DWORD){0})
#define unlink(path) _wunlink(wide(path))
#define fchmod(fd, mode) 0
#define fsync _commit
#define rename move_file
#define NO_READER EINVAL  // what write() says of a pipe
#define read read_bytes

static wchar_t *wide(const char *path) {
    static wchar_t text[4096];
    if (!MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, text, 4096)) text[0] = 0;
    return text;
}

static HANDLE handle(int fd) { return (HANDLE)_get_osfhandle(fd); }

INLINE int move_file(const char *from, const char *to) {
    wchar_t old[4096];
    wcscpy(old, wide(from));
    errno = EACCES;
    return MoveFileExW(old, wide(to), MOVEFILE_REPLACE_EXISTING) ? 0 : -1;
}

INLINE ssize_t pread(int fd, void *p, size_t n, uint64_t at) {
    OVERLAPPED place = {.Offset = (DWORD)at, .OffsetHigh = (DWORD)(at >> 32)};
    DWORD done = 0;
    return ReadFile(handle(fd), p, (DWORD)n, &done, &place) ? (ssize_t)done : -1;
}

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

static bool file_lock(int fd) {  // a byte far after the end, because nobody could read it
    OVERLAPPED at = {.OffsetHigh = INT32_MAX};
    const DWORD how = LOCKFILE_FAIL_IMMEDIATELY | LOCKFILE_EXCLUSIVE_LOCK;
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

// The least limit of this process's cgroup and its parents (Linux, version 2), from files with a
// number, or "max" for none. cpu.max has two, "QUOTA PERIOD": cores are their ratio.
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

// Physical cores, because a second thread on one gains nothing: a core's second CPU counts only if
// its first is not ours. On macOS the fast ones, else all CPUs. At most what the cgroup may use.
static int cpu_count(void) {
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
#ifdef __linux__
    cpu_set_t ours = {0};
    if (sched_getaffinity(0, sizeof(ours), &ours) == 0) cores = CPU_COUNT(&ours);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        char path[96];
        int first = cpu;
        if (!CPU_ISSET(cpu, &ours)) continue;
        snprintf(path, 96, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        scan_file(path, "%d", &first, NULL);
        cores -= first != cpu && CPU_ISSET(first, &ours);
    }
#elif defined(__APPLE__)
    sysctlbyname("hw.perflevel0.physicalcpu", &cores, &(size_t){sizeof(cores)}, NULL, 0);
#endif
    return max_int((int)fmin(cores, ceil(cgroup_limit("cpu.max"))), 1);
}

// The machine's memory, or less if this process has a limit: ulimit -v, ulimit -d, its cgroup's.
static double memory_size(void) {
    double size = (double)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0) size = fmin(size, limit.rlim_cur);
    if (getrlimit(RLIMIT_DATA, &limit) == 0) size = fmin(size, limit.rlim_cur);
    return fmin(size, cgroup_limit("memory.max"));
}

// A file system that has no locks has none to break. A killed program may take a while to end.
static bool file_lock(int fd) {
    for (int i = 0; i < 20; i++, usleep(50000))
        if (flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
    return false;
}

static bool input_ready(int fd) { return poll(&(struct pollfd){fd, POLLIN, 0}, 1, 0) != 0; }

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
    // /dev/null takes a closed descriptor, so that its use fails. Else the next file would get its
    // number, and be read for stdin, or get what is meant for stdout or stderr.
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY, 0) < 0)
            die("descriptor %d: closed, expected it open, or /dev/null in its place", fd);
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

static bool same_file(int a, int b) {
    struct stat x, y;  // on Windows fstat has no inode
    return fstat(a, &x) == 0 && fstat(b, &y) == 0 && S_ISREG(x.st_mode) && x.st_ino != 0 &&
           x.st_ino == y.st_ino && x.st_dev == y.st_dev;
}

#ifndef PLAIN
static bool file_move(int fd, void *p, size_t n, uint64_t at, bool writes) {
    ssize_t moved = 1;
    for (char *next = p; n > 0 && moved > 0; n -= moved, next += moved, at += moved)
        moved = writes ? write(fd, next, n) : pread(fd, next, n, at);
    return moved > 0;
}

// Its name is hardly another process's. It has the permissions of `path`, or is private.
static int file_create(const char *path, char name[LONGEST_NAME]) {
    const unsigned mode = file_mode(path);
    snprintf(name, LONGEST_NAME, "%s.%d-%.0f.part", path, (int)getpid(), now() * 1e9);
    errno = EACCES;
    if (mode && !(mode & 0222)) return -1;  // read-only: rename would not care
    const int fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd >= 0 && mode) (void)!fchmod(fd, mode & 0777);
    return fd;
}

static void real_name(const char *path, char name[LONGEST_NAME]) {
    char *real = realpath(path, NULL);  // NULL: there is none yet
    snprintf(name, LONGEST_NAME, "%s", real && strlen(real) <= LONGEST_PATH ? real : path);
    free(real);
}

static bool file_replace(const char *path, const char *name, int fd, bool whole) {
    whole = whole && fsync(fd) == 0;
    if (fd >= 0 && close(fd) != 0) whole = false;
    if (whole && rename(name, path) == 0) return true;
    const int error = errno;
    if (fd >= 0) unlink(name);
    errno = error;
    return false;
}
#endif

static void use_huge_pages(void *p, size_t size) {
    (void)p, (void)size;
#ifdef MADV_HUGEPAGE
    madvise(p, size, MADV_HUGEPAGE);
#endif
}

static Bytes file_map(const char *path) {
    const int fd = open(path, O_RDONLY | O_NONBLOCK, 0);  // does not wait for a named pipe's writer
    if (fd < 0) {
        const char *error = strerror(errno);
        die("%s: %s, expected a file made by export.py%s", path, error, name_hint(path));
    }
    const size_t size = (size_t)file_size(fd);
    if (size == 0) die("%s: empty? expected a regular file with data, found none", path);
    void *p = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        die("%s: can't map %.0f MB: %s (ulimit -v?)", path, size / 1e6, strerror(errno));
    close(fd);
    // If memory is too small for the model, huge pages would read more than an expert's matrix.
    if (size < 0.75 * memory_size()) use_huge_pages(p, size);
    return (Bytes){p, size};
}

static ssize_t read_more(int fd, Buffer *b) {
    b->p = grow(b->p, &b->cap, b->n, 65536, 1);
    for (;;) {
        // Ctrl-C just before a poll begins does not end it: so each poll is short.
        while (!interrupted && poll(&(struct pollfd){fd, POLLIN, 0}, 1, 100) == 0) {}
        const ssize_t got = interrupted ? -1 : read(fd, b->p + b->n, 65536);
        if (got > 0) b->n += got;
        if (got >= 0 || interrupted || (errno != EINTR && errno != EAGAIN)) return got;
    }
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
        else if (errno == EAGAIN) (void)poll(&(struct pollfd){STDOUT_FILENO, POLLOUT, 0}, 1, -1);
        else if (errno != EINTR) die("%s: %s", stdout_name, strerror(errno));
    }
}
