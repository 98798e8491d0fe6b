// What needs qwen3.c's own functions. The name `render` means the mode of that name.
//
// tests/test                               checks them, most against naive versions in double: prints
//                                          each failure with its line, exits with 1 if there is any
// tests/test tokens MODEL < records        a line of ids for each text: marked (added tokens count, as
//                                          in the raw modes) or plain (they are text, as in chat)
// tests/test render MODEL 0|1 < records    the ids of a conversation's prompt, thinking off or on:
//                                          system, user and assistant (in which added tokens count)
//
// tests/test list BLOCKS[,SEED] MODEL ...  runs qwen3 MODEL ... with at most so many blocks in its cache, if
//                                          that is enough for a text; without -q says how many rows ran;
//                                          with SEED, at random, texts go back further than they need, and
//                                          any ids are guessed, or those of a run before with SEED,FILE
//
// A record is "KIND BYTES\n", that many bytes, and a newline that may be missing.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#ifndef _WIN32
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

// Ctrl-C just before each wait: the wait must not go on for long.
static int press_ctrl_c;
static int interrupted_poll(struct pollfd *fds, nfds_t n, int milliseconds) {
    if (press_ctrl_c) raise(SIGINT);
    return poll(fds, n, milliseconds);
}
#define poll interrupted_poll
#endif

static char root[64];  // where the system's files are
static FILE *open_below_root(const char *path, const char *mode) {
    char name[9000];
    snprintf(name, sizeof(name), "%s%s", root, path);
    return fopen(name, mode);
}

static int allocations;

static void *counted_realloc(void *p, size_t size) {
    allocations++;
    return realloc(p, size);
}

static void *counted_calloc(size_t count, size_t size) {
    allocations++;
    return calloc(count, size);
}

#ifdef __linux__
#include <sched.h>
static const cpu_set_t *made_up;  // the CPUs that this process may use; NULL: the true ones
static int affinity(pid_t process, size_t size, cpu_set_t *set) {
    if (!made_up) return sched_getaffinity(process, size, set);
    *set = *made_up;
    return 0;
}
#define sched_getaffinity affinity
#endif

#define fopen open_below_root
#define realloc counted_realloc
#define calloc counted_calloc
struct Engine;
struct Text;
struct Kept;
static void check_rows(const struct Engine *e, int n);  // see naive.h
static void check_copy(const struct Engine *e, int to, int from);
static void check_state_copy(float *to, const float *from);
static void check_loaded(const struct Engine *e, const struct Kept *kept);
static size_t give_up(size_t n);
static size_t guess_any(struct Engine *e, const struct Text *t, int count, size_t from);
#include "../qwen3.c"
#include "naive.h"

// Models and their memory are never given back here.
const char *__asan_default_options(void) { return "detect_leaks=0"; }

static int failures, checks;

#define CHECK(condition, ...) do { \
        checks++; \
        if (!(condition) && ++failures < 50) { \
            fprintf(stderr, "tests/test.c:%d: %s: ", __LINE__, #condition); \
            fprintf(stderr, " " __VA_ARGS__); \
            fputc('\n', stderr); \
        } \
    } while (0)

static uint64_t rng = 1;

static double uniform(void) { return 2 * random_next(&rng) - 1; }  // in [-1, 1)

static int below(int n) { return (int)(random_next(&rng) * n); }

static float *random_floats(size_t n) {
    float *x = alloc(n, sizeof(float), "a test");
    for (size_t i = 0; i < n; i++) x[i] = (float)uniform();
    return x;
}

static Matrix random_matrix(int rows, int cols, int group) {
    size_t n = (size_t)round_up(rows, PANEL) * cols;
    int8_t *q = alloc(n, 1, "a test");
    float *scale = random_floats(n / group);
    for (size_t i = 0; i < n; i++) q[i] = (int8_t)(below(256) - 128);  // -128 too, which export.py never writes
    return (Matrix){.rows = rows, .cols = cols, .group_size = group, .bits = 8, .bytes = q, .scales = scale};
}

// With four bits; `same` becomes the matrix of int8 and floats that stands for the same weights.
static Matrix random_matrix_4(int rows, int cols, int group, Matrix *same) {
    static const int8_t levels[16] = {-128, -100, -78, -61, -46, -33, -21, -9,
                                      2, 13, 24, 36, 49, 64, 82, 127};
    const size_t n = (size_t)round_up(rows, PANEL) * cols, n_groups = n / group;
    uint8_t *nibbles = alloc(n / 2, 1, "a test");
    uint16_t *half_scale = alloc(n_groups, sizeof(uint16_t), "a test");
    int8_t *q = alloc(n, 1, "a test");
    float *scale = random_floats(n_groups);
    const Matrix w = {.rows = rows, .cols = cols, .group_size = group, .bits = 4, .bytes = (int8_t *)nibbles,
                      .scales = half_scale, .levels = levels};
    for (size_t i = 0; i < n / 2; i++) nibbles[i] = (uint8_t)below(256);
    for (size_t g = 0; g < n_groups; g++) {
        half_scale[g] = (uint16_t)below(0x7C00);  // every finite float of 16 bits that is not negative
        scale[g] = ldexpf(half_scale[g] % 1024 + (half_scale[g] < 1024 ? 0 : 1024),
                          max_int(half_scale[g] / 1024, 1) - 25);
    }
    for (size_t i = 0; i < n; i++) {  // byte i % 4 of a word of row r
        const int word = i / 4 / PANEL % (cols / 4), r = i / 4 % PANEL + i / cols / PANEL * PANEL;
        q[i] = weight_int(&w, r, 4 * word + i % 4);
    }
    *same = (Matrix){.rows = rows, .cols = cols, .group_size = group, .bits = 8, .bytes = q, .scales = scale};
    return w;
}

typedef enum { QWEN3, QWEN2, EXPERTS, DELTA } Kind;

// A random model has POSITIONS positions, two whole spans and a part of a third. WIDEST is the largest
// head_dim with which attention is tested.
enum { POSITIONS = 2 * SPAN + 90, WIDEST = 132 };

static void make_delta(const Config *c, Layer *l) {
    float *forget = random_floats(c->delta_v_heads);
    for (int i = 0; i < c->delta_v_heads; i++) forget[i] = fabsf(forget[i]) / 4;
    l->wq = random_matrix(c->delta_k_dim, c->dim, c->group_size);
    l->wk = random_matrix(c->delta_k_dim, c->dim, c->group_size);
    l->wv = random_matrix(c->delta_v_dim, c->dim, c->group_size);
    l->wg = random_matrix(c->delta_v_dim, c->dim, c->group_size);
    l->wo = random_matrix(c->dim, c->delta_v_dim, c->group_size);
    l->conv = random_floats((PAST + 1) * c->delta_dim);
    l->forget = forget;
    l->dt_bias = random_floats(c->delta_v_heads);
    l->o_norm = random_floats(DELTA_DIM);
    l->wa = random_floats(c->delta_v_heads * c->dim);
    l->wb = random_floats(c->delta_v_heads * c->dim);
}

// A model in memory: two query heads per kv head; no rows of whole tiles.
// EXPERTS: 3 of 7, of which two are always equally likely; rope rotates half of a head. The last layer is the
// first in the cache: so nobody takes one number for the other. DELTA: so do those with a delta rule, the first
// and the third of four; also experts, of which one is shared.
static Model random_model(int group, int head_dim, Kind kind) {
    Model m = {.config = {.dim = 2 * group, .hidden_dim = 3 * group, .n_layers = kind == DELTA ? 4 : 2, .n_heads = 4,
                          .n_kv_heads = 2, .vocab_size = 77, .max_seq_len = POSITIONS, .head_dim = head_dim,
                          .group_size = group, .rope_theta = 1e4f, .rms_norm_eps = 1e-6f}};
    Config *g = &m.config;
    g->q_dim = g->n_heads * head_dim;
    g->kv_dim = g->n_kv_heads * head_dim;
    g->rotary_dim = kind >= EXPERTS ? head_dim / 2 : head_dim;
    g->n_kv_layers = 2;
    if (kind >= EXPERTS) g->n_experts = 7, g->n_experts_used = 3;
    if (kind == DELTA) {
        g->shared_expert = 1, g->attention_every = 2, g->delta_k_heads = 2, g->delta_v_heads = 4;
        g->delta_k_dim = 2 * DELTA_DIM, g->delta_v_dim = 4 * DELTA_DIM, g->delta_dim = 8 * DELTA_DIM;
    }
    m.weights.embedding = random_matrix(g->vocab_size, g->dim, group);
    m.weights.classifier = random_matrix(g->vocab_size, g->dim, group);
    m.weights.rms_final = random_floats(g->dim);
    m.weights.layers = alloc(g->n_layers, sizeof(Layer), "a test");
    for (int i = 0; i < g->n_layers; i++) {
        Layer *l = &m.weights.layers[i];
        l->number = (g->n_layers - 1 - i) * 2 / g->n_layers;
        l->rms_att = random_floats(g->dim);
        l->rms_ffn = random_floats(g->dim);
        l->q_norm = random_floats(head_dim);
        l->k_norm = random_floats(head_dim);
        l->wq = random_matrix(g->q_dim, g->dim, group);
        if (kind == QWEN2) {
            l->q_norm = l->k_norm = NULL;
            l->bq = random_floats(g->q_dim);
            l->bk = random_floats(g->kv_dim);
            l->bv = random_floats(g->kv_dim);
        }
        l->wk = random_matrix(g->kv_dim, g->dim, group);
        l->wv = random_matrix(g->kv_dim, g->dim, group);
        l->wo = random_matrix(g->dim, g->q_dim, group);
        if (kind == DELTA) l->wg = random_matrix(g->q_dim, g->dim, group);
        if (kind == DELTA && i % 2 == 0) make_delta(g, l);
        const int experts = max_int(all_experts(g), 1);
        l->w1 = random_matrix(experts * g->hidden_dim, g->dim, group);
        l->w3 = random_matrix(experts * g->hidden_dim, g->dim, group);
        l->w2 = random_matrix(experts * g->dim, g->hidden_dim, group);
        if (kind >= EXPERTS) {
            float *router = random_floats((size_t)all_experts(g) * g->dim);
            memcpy(router + 2 * g->dim, router + 5 * g->dim, g->dim * sizeof(float));
            l->router = router;
        }
    }
    m.context = g->max_seq_len;
    state_init(&m);
    return m;
}

// What runs it in passes of `batch` rows
static Pass *random_pass(const Model *m, int batch) { return pass_init(m, batch, batch, 1); }

static void test_exp(void) {
    for (float x = -86.9f; x < 88; x += 0.01237f) {
        double error = fabs(fast_exp(x) / exp((double)x) - 1);
        CHECK(error < 3e-7, "exp(%g) is off by %g", x, error);
    }
    CHECK(fast_exp(0) == 1);
    CHECK(fast_exp(-87.6f) > 0 && fast_exp(-87.6f) < 1e-38f && fast_exp(-87.7f) == 0);
    CHECK(fast_exp(-1e30f) == 0 && fast_exp(-INFINITY) == 0);
    CHECK(isfinite(fast_exp(1e30f)));
}

static void test_norm_softmax_silu(void) {
    for (int n = 1; n < 200; n += 7) {
        float *x = random_floats(n), *w = random_floats(n), *out = random_floats(n);
        double squares = 0, sum = 0, max = -1e9;
        for (int i = 0; i < n; i++) squares += (double)x[i] * x[i];
        rmsnorm(out, x, w, n, 1e-3f);
        for (int i = 0; i < n; i++) {
            double expected = w[i] * x[i] / sqrt(squares / n + 1e-3);
            CHECK(fabs(out[i] - expected) < 1e-5, "rmsnorm %d of %d: %g, not %g", i, n, out[i], expected);
        }
        memcpy(out, x, n * sizeof(float));
        for (int i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
        for (int i = 0; i < n; i++) sum += exp(x[i] - max);
        CHECK(fabs(softmax_terms(out, n, max_of(x, n)) - sum) < 1e-6 * sum);
        for (int i = 0; i < n; i++) CHECK(fabs(out[i] - exp(x[i] - max)) < 1e-6);
        memcpy(out, x, n * sizeof(float));
        silu_times(out, w, n);
        for (int i = 0; i < n; i++) CHECK(fabs(out[i] - x[i] / (1 + exp(-x[i])) * w[i]) < 1e-6);
    }
}

// The primitives' definitions
INLINE VecI dot4_plain(VecI acc, VecI w, VecI x) {
    const uint8_t *wb = (const uint8_t *)&w;
    const int8_t *xb = (const int8_t *)&x;
    for (int i = 0; i < 4 * LANES; i++) {
        acc[i / 4] += (W_BIAS ? wb[i] : (int8_t)wb[i]) * xb[i];
    }
    return acc;
}

INLINE VecI pick_levels_plain(VecI table, VecI n) {
    VecI result = {0};
    for (size_t i = 0; i < sizeof(n); i++) {
        ((uint8_t *)&result)[i] = ((uint8_t *)&table)[((uint8_t *)&n)[i] % 16];
    }
    return result;
}

// The instruction set's primitives are equal to the portable ones, bit for bit where they are exact.
static void test_primitives(void) {
    for (int trial = 0; trial < 2000; trial++) {
        int8_t w[4 * LANES], x[4 * LANES];
        for (int i = 0; i < 4 * LANES; i++) {
            w[i] = (int8_t)(trial % 3 ? below(256) - 128 : -128 + 255 * below(2));
            x[i] = (int8_t)(trial % 3 ? below(255) - 127 : -127 + 254 * below(2));
        }
        VecI xv = load_vector(x), wv = load_vector(w), acc;
        acc = wv >> 8;  // no overflow
        VecI a = dot4(acc, wv ^ splat(FLIP), xv), b = dot4_plain(acc, wv ^ splat(FLIP), xv);
        CHECK(memcmp(&a, &b, sizeof(a)) == 0);
        a = pick_levels(level_table(x), wv), b = pick_levels_plain(level_table(x), wv);
        CHECK(memcmp(&a, &b, sizeof(a)) == 0);
        const VecF floats = load_bytes(w + trial % (3 * LANES));
        for (int i = 0; i < LANES; i++) CHECK(floats[i] == w[i + trial % (3 * LANES)]);
    }
    for (int trial = 0; trial < 2000; trial++) {  // in about half of the trials, rounding twice gives other bits
        VecF a, b, c;
        for (int i = 0; i < LANES; i++) a[i] = (float)uniform(), b[i] = (float)uniform(), c[i] = (float)uniform();
        const VecF found = mul_add_v(a, b, c);
        for (int i = 0; i < LANES; i++) {
            CHECK(found[i] == mul_add(a[i], b[i], c[i]), "FUSED is %d", FUSED);
            CHECK(fabs(found[i] - ((double)a[i] * b[i] + c[i])) < 2e-7);
        }
    }
}

// All floats of 16 bits: the definition against ldexp, and the primitive against the definition
static void test_half_float(void) {
    for (int h = 0; h < 1 << 16; h += LANES) {
        uint16_t halves[LANES];
        for (int i = 0; i < LANES; i++) halves[i] = (uint16_t)(h + i);
        const VecF all = load_halves(halves);
        for (int i = 0; i < LANES; i++) {
            const int exponent = (h + i) >> 10 & 31, fraction = (h + i) & 1023;
            double value = ldexp(fraction + (exponent ? 1024 : 0), max_int(exponent, 1) - 25);
            if (exponent == 31) value = fraction ? NAN : INFINITY;
            if (h + i >= 1 << 15) value = -value;
            const float found = half_float(halves[i]);
            if (isnan(value)) CHECK(isnan(found) && isnan(all[i]), "%x", h + i);
            else CHECK(found == value && all[i] == value && !signbit(found) == !signbit(value), "%x", h + i);
        }
    }
}

static void test_quantize(void) {
    for (int group = 32; group <= 256; group *= 2) {
        const int cols = 3 * group;
        Quantized x = quantized_init(2, cols, group), row = from_token(&x, 1);
        float *in = random_floats(cols);
        memset(in + group, 0, group * sizeof(float));        // zeros: scale 0
        for (int i = 0; i < group; i++) in[2 * group + i] *= 1e-42f;  // too small for a scale
        quantize_token(&x, 0, 0, in, cols, group);
        float max = 0;
        int sum = 0;
        for (int i = 0; i < group; i++) max = fmaxf(max, fabsf(in[i]));
        for (int i = 0; i < group; i++) sum += x.int8[i];
        CHECK(x.bias_fix[0] == -W_BIAS * sum && x.bias_fix[1] == 0 && x.bias_fix[2] == 0);
        CHECK(x.scale[0] == max / 127 && x.scale[1] == 0 && x.scale[2] == 0);
        for (int i = 0; i < group; i++) {
            CHECK(fabs(x.int8[i] * (double)x.scale[0] - in[i]) <= x.scale[0] * 0.5001);
            CHECK(x.int8[group + i] == 0 && x.int8[2 * group + i] == 0);
        }
        const Q8 plain = q8_init(cols, group);
        quantize(plain, in, cols, group);
        CHECK(!memcmp(plain.int8, x.int8, cols) && !memcmp(plain.scale, x.scale, 3 * sizeof(float)));
        quantize_token(&x, 1, 2 * group, in, group, group);  // the first group as row 1's last
        CHECK(memcmp(row.int8 + 2 * group, x.int8, group) == 0 && row.int8[group] == 0);
        CHECK(row.scale[2] == x.scale[0] && row.bias_fix[2] == x.bias_fix[0] && row.scale[1] == 0);
        in[2 * group + 5] = group % 64 ? INFINITY : -INFINITY;
        quantize_token(&x, 0, 2 * group, in + 2 * group, group, group);
        quantize(plain, in, cols, group);
        CHECK(isinf(x.scale[2]) && isinf(plain.scale[2]) && x.bias_fix[2] == 0);
        for (int i = 2 * group; i < cols; i++) CHECK(x.int8[i] == 0 && plain.int8[i] == 0);
        in[2 * group + 9] = NAN;
        quantize_token(&x, 0, 2 * group, in + 2 * group, group, group);
        quantize(plain, in, cols, group);
        CHECK(isnan(x.scale[2]) && isnan(plain.scale[2]));
    }
}

// Every kernel against the definition bit for bit, and that against doubles; rows and tokens that
// fill no tile, and a sum that is added. w's weights are `same`'s.
static void test_products(Matrix w, Matrix same) {
    const int rows = w.rows, cols = w.cols, group = w.group_size, n = 3 * TILE_TOKENS + 2;
    float *in = random_floats((size_t)n * cols);
    float *one = random_floats(n * rows), *all = random_floats(n * rows);
    int8_t *unit = alloc(UNIT * (cols + cols / group * 4), 1, "");
    const Worker me = {.unit = unit};
    Quantized x = quantized_init(n, cols, group);
    memset(unit, 0xFF, UNIT * (cols + cols / group * 4));  // NaN
    for (int t = 0; t < n; t++) quantize_token(&x, t, 0, in + t * cols, cols, group);
    for (int i = 0; i < TILE_TOKENS * (cols / group); i++) {  // past the last token
        from_token(&x, n + i / (cols / group)).scale[i % (cols / group)] = NAN;
    }
    for (int t = 0, few = 1; t < n; t += few++) {  // 1, 2, 3, ... tokens
        const Quantized from = from_token(&x, t);
        multiply(&me, one + t * rows, rows, &w, 0, rows, &from, min_int(few, n - t), false);
    }
    memset(all, 0, n * rows * sizeof(float));
    for (int row = 0; row < rows; row += STRIP + 1) {  // parts that fill no block, either
        int end = min_int(row + STRIP + 1, rows);
        const int few = row / (STRIP + 1) % 2 ? 2 * TILE_TOKENS + 1 : 0;  // not unpacked where that is a copy
        const Quantized from = from_token(&x, 1), rest = from_token(&x, 1 + few);
        multiply(&me, all + rows + row, rows, &w, row, end - row, &from, few, false);
        multiply(&me, all + (1 + few) * rows + row, rows, &w, row, end - row, &rest, n - 1 - few, false);
        multiply(&me, all + rows + row, rows, &w, row, end - row, &from, 1, true);  // the first of these tokens twice
    }
    for (int t = 0; t < n; t++) {
        const Quantized token = from_token(&x, t);
        for (int r = 0; r < rows; r++) {
            double sum = 0, size = 0;
            for (int i = 0; i < cols; i++) {
                double a = weight_int(&same, r, i) * (double)weight_scale(&same, r, i / group);
                double b = token.int8[i] * (double)token.scale[i / group];
                sum += a * b;
                size += fabs(a * b);
            }
            const Q8 vector = {token.int8, token.scale};
            float value = dot_row(&w, r, vector);
            CHECK(fabs(value - sum) < 1e-6 * size, "group %d", group);
            CHECK(value == dot_row(&same, r, vector), "group %d", group);
            CHECK(one[t * rows + r] == value, "group %d, row %d", group, r);
            float expected = t == 0 ? 0 : t == 1 ? 2 * value : value;
            CHECK(all[t * rows + r] == expected, "group %d, row %d", group, r);
        }
    }
}

static void test_matmul(void) {
    static const int rests[] = {3, LANES / 2};  // groups after the last whole vector
    const int rows = 4 * UNIT + STRIP - 3;
    for (int group = 32; group <= 256; group *= 2) {
        for (int i = 0; i < 2; i++) {
            const int cols = (2 * LANES + rests[i]) * group;
            Matrix w = random_matrix(rows, cols, group), same;
            test_products(w, w);
            w = random_matrix_4(rows, cols, group, &same);
            test_products(w, same);
        }
    }
}

// A text of its own for each model: blocks in reverse order, so that nobody reads them as they lie
static int *scattered(const Pass *p) {
    int *blocks = whole_cache(p);
    for (int i = 0; i < p->n_blocks; i++) blocks[i] = p->n_blocks - 1 - i;
    return blocks;
}

static int layer;  // to which all threads have come

static Worker *worker_at_layer(const Pass *p) {
    Worker *me = &p->workers[thread];
    me->n = p->n;
    me->w = &me->p->m->weights.layers[layer];
    return me;
}

// This thread's worker in a pass of n rows that has come to layer l
static Worker *start_layer(Pass *p, int l, int n) {
    p->n = n;
    layer = l;
    return worker_at_layer(p);
}

// Element j of a row's key, or of its value, as the tiles of attention read it
static float number_of(const Pass *p, size_t pair, const Row *row, int j, bool value) {
    const Config *c = &p->m->config;
    const int at = index_in_cell(c, row->pos, j, value), i = at / LANES, k = value ? row->pos % BLOCK : i % 16;
    const VecF vector = cache_load(cache_cell(p, pair, row->blocks, row->pos), i - k, k, value, c->cache_bits == 8);
    return ((const float *)&vector)[at % LANES];
}

static void put(const Worker *me, int t, int kv_head, const float *x, float *plain, bool value) {
    const Row *row = &me->p->rows[t];
    const int head_dim = me->c->head_dim;
    memcpy(plain, x, head_dim * sizeof(float));
    if (me->c->cache_bits == 8) round_to_int8(plain, NULL, head_dim);
    cache_store(me->p, pair_of(me, kv_head), row, x, value);
    for (int j = 0; j < head_dim; j++) {
        const float found = number_of(me->p, pair_of(me, kv_head), row, j, value);
        CHECK(memcmp(&found, plain + j, sizeof(float)) == 0 || (isnan(found) && isnan(plain[j])));
    }
}

// Store a key or a value (head_dim) of row t in this layer, and where Part I has it.
static void put_key(const Worker *me, int t, int kv_head, const float *k) {
    const int pos = me->p->rows[t].pos;
    put(me, t, kv_head, k, in_cache(me->p->m, me->p->m->state.keys, layer, pos, kv_head), false);
}

static void put_value(const Worker *me, int t, int kv_head, const float *v) {
    const int pos = me->p->rows[t].pos;
    put(me, t, kv_head, v, in_cache(me->p->m, me->p->m->state.values, layer, pos, kv_head), true);
}

// Random keys and values (head_dim) of this layer at the first n positions
static void fill_cache(const Worker *me, const int *blocks, int n) {
    const Config *c = me->c;
    Row *row = me->p->rows;
    for (int pos = 0; pos < n; pos++) {
        *row = (Row){.pos = pos, .blocks = blocks};
        for (int h = 0; h < c->n_kv_heads; h++) {
            float *x = random_floats(2 * c->head_dim);
            put_key(me, 0, h, x);
            put_value(me, 0, h, x + c->head_dim);
        }
    }
}

// attend() against doubles, without spans
static void check_attend(const Model *m, int l, int head, int pos) {
    const int head_dim = m->config.head_dim, len = pos + 1;
    double p[POSITIONS], total = 0, largest = -INFINITY;
    for (int i = 0; i < len; i++) {
        p[i] = attention_score(m->state.q + head * head_dim, in_cache(m, m->state.keys, l, i, head / 2), head_dim);
        largest = fmax(largest, p[i]);
    }
    for (int i = 0; i < len; i++) total += p[i] = exp(p[i] - largest);
    for (int j = 0; j < head_dim; j++) {
        double sum = 0;
        for (int i = 0; i < len; i++) sum += p[i] * in_cache(m, m->state.values, l, i, head / 2)[j];
        const float found = m->state.a[head * head_dim + j];
        CHECK(fabs(found - sum / total) <= 1e-5, "position %d, head %d, column %d", pos, head, j);
    }
}

static void attend_job(void *pass) { attend_all(worker_at_layer(pass)); }

// attend_all() against attend(), bit for bit
static void check_attention(Model *m, Worker *me) {
    const Config *c = me->c;
    const size_t size = c->head_dim * sizeof(float);
    on_all_threads(attend_job, me->p);
    for (int t = 0; t < me->n; t++) {
        memcpy(m->state.q, me->q + t * c->q_dim, c->q_dim * sizeof(float));
        for (int h = 0; h < c->n_heads; h++) {
            const int at = h * c->head_dim;
            attend(m, layer, h, me->p->rows[t].pos);
            CHECK(!memcmp(me->a + t * c->q_dim + at, m->state.a + at, size), "token %d, head %d", t, h);
            check_attend(m, layer, h, me->p->rows[t].pos);
        }
    }
}

// Batches of 1 to 40 tokens, at the beginning, anywhere, at the end and across spans
static void test_attention(void) {
    static const int head_dims[] = {24, 64, 88, 16, 64, 48, WIDEST, 80};  // also an odd number of vectors
    for (int i = 0; i < 8; i++) {
        Model m = random_model(32, head_dims[i], QWEN3);
        m.config.cache_bits = i % 2 ? 8 : 32;
        Pass *p = random_pass(&m, 40);
        Worker *me = start_layer(p, 1, 0);
        const int *blocks = scattered(p);
        fill_cache(me, blocks, POSITIONS);
        for (int round = 0; round < 10; round++) {
            me->n = me->p->n = round == 8 ? 2 : 1 + round % 4 * 13;
            int start = below(round < 4 ? 101 - me->n : POSITIONS + 1 - me->n);
            if (round == 4 || (round >= 6 && round <= 8)) start = 2 * SPAN + 1;
            if (round == 5) start = SPAN - 6;  // across spans
            for (int t = 0; t < me->n; t++) p->rows[t] = (Row){.pos = start + t, .blocks = blocks};
            for (int j = 0; j < me->n * m.config.q_dim; j++) me->q[j] = 5 * (float)uniform();
            check_attention(&m, me);
        }
        cache_copy(p, blocks[1], blocks[0]);  // all of a block, its scales as well
        for (int at = 0; at < BLOCK * m.config.head_dim; at++) {
            const Row from = {.pos = at % BLOCK, .blocks = blocks}, to = {.pos = BLOCK + at % BLOCK, .blocks = blocks};
            for (int value = 0; value < 2; value++)
                CHECK(number_of(p, pair_of(me, 1), &from, at / BLOCK, value) == number_of(p, pair_of(me, 1), &to, at / BLOCK, value));
        }
    }
}

// Scores of -infinity count as 0, even if they are all those of a span; one NaN makes a row NaN.
static void test_attention_not_finite(void) {
    for (int i = 0; i < 4; i++) {
        const int round = i / 2;
        Model m = random_model(64, 32, QWEN3);
        m.config.cache_bits = i % 2 ? 8 : 32;
        State *s = &m.state;
        Pass *p = random_pass(&m, 40);
        Worker *me = start_layer(p, 0, 1);
        float huge[32], nan[32];
        const int *blocks = scattered(p);
        fill_cache(me, blocks, POSITIONS);
        for (int j = 0; j < 32; j++) huge[j] = -3e38f, nan[j] = NAN;
        for (int pos = 0; pos < SPAN; pos++) p->rows[0].pos = pos + round * SPAN, put_key(me, 0, 0, huge);
        p->rows[0].pos = round * SPAN + 10;
        put_key(me, 0, 1, nan);
        p->rows[0].pos = POSITIONS - 1;
        for (int j = 0; j < m.config.q_dim; j++) me->q[j] = s->q[j] = 5;
        on_all_threads(attend_job, me->p);
        for (int h = 0; h < 4; h++) {
            const float found = me->a[h * 32];
            attend(&m, 0, h, POSITIONS - 1);
            CHECK(h < 2 ? found == s->a[h * 32] : isnan(found) && isnan(s->a[h * 32]), "head %d: %g", h, found);
        }
    }
}

// Row `bad` of a batch has a key and values that are not finite. The rows before it, in its block and
// in its tile, do not see them; the rest of its block and the next hold such positions as well.
static void test_attention_reads_nothing_later(void) {
    static const float values[] = {NAN, INFINITY, -INFINITY};
    for (int trial = 0; trial < 100; trial++) {
        static float finite[40 * 4 * WIDEST];
        Model m = random_model(32, trial % 2 ? 40 : 64, QWEN3);
        m.config.cache_bits = trial % 4 == 0 ? 8 : 32;
        Pass *p = random_pass(&m, 40);
        const int *blocks = scattered(p);
        const int n = 1 + below(40), start = trial % 3 ? below(300) : SPAN - below(n);
        const int bad = below(n + 1), q_dim = m.config.q_dim;
        Worker *me = start_layer(p, 0, n);
        float huge[WIDEST];
        for (int j = 0; j < WIDEST; j++) huge[j] = values[(trial + j * (trial % 5 == 0)) % 3];
        fill_cache(me, blocks, POSITIONS);
        memcpy(me->q, random_floats(n * q_dim), n * q_dim * sizeof(float));
        for (int t = 0; t < n; t++) p->rows[t] = (Row){.pos = start + t, .blocks = blocks};
        on_all_threads(attend_job, me->p);
        memcpy(finite, me->a, n * q_dim * sizeof(float));
        for (int pos = start + bad; pos < start + n + 2 * LANES; pos += pos < start + n ? n : 1) {
            p->rows[0].pos = pos;
            for (int h = 0; h < 2; h++) put_key(me, 0, h, huge), put_value(me, 0, h, huge);
        }
        p->rows[0].pos = start;
        on_all_threads(attend_job, me->p);
        for (int t = 0; t < n; t++) {
            CHECK(memcmp(me->a + t * q_dim, finite + t * q_dim, q_dim * sizeof(float)) == 0 || t >= bad,
                  "trial %d: row %d of %d, not finite from %d on", trial, t, n, bad);
            CHECK(t < bad || !isfinite(me->a[t * q_dim]), "trial %d: row %d", trial, t);
        }
    }
}

// With a query that is 400 times the key of position i, the answer is the value of position i.
static void test_attention_one_hot(void) {
    Model m = random_model(64, 32, QWEN3);
    Pass *p = random_pass(&m, 40);
    const Config *c = &m.config;
    Worker *me = start_layer(p, 1, 3);
    const int *blocks = scattered(p);
    fill_cache(me, blocks, 40);
    int wanted[3 * 4];  // by tokens and heads
    for (int i = 0; i < 3 * c->n_heads; i++) {
        p->rows[i / c->n_heads] = (Row){.pos = 37 + i / c->n_heads, .blocks = blocks};
        wanted[i] = below(38 + i / c->n_heads);
        for (int j = 0; j < c->head_dim; j++)
            me->q[i * c->head_dim + j] = 400 * in_cache(&m, m.state.keys, layer, wanted[i], i % c->n_heads / 2)[j];
    }
    on_all_threads(attend_job, me->p);
    for (int i = 0; i < 3 * c->n_heads; i++) {
        for (int j = 0; j < c->head_dim; j++) {
            float expected = in_cache(&m, m.state.values, layer, wanted[i], i % c->n_heads / 2)[j];
            CHECK(fabsf(me->a[i * c->head_dim + j] - expected) < 0.01f, "row %d, column %d", i, j);
        }
    }
}

// Logits of every position do not depend on how the tokens are cut into batches, nor on threads.
static void test_batches(void) {
    int tokens[60];
    for (int i = 0; i < 60; i++) tokens[i] = below(77);
    for (int head_dim = 32; head_dim <= 112; head_dim += 16) {  // 48, 80, 112: no whole vectors
        const Kind kind = head_dim == 48 || head_dim == 64 ? QWEN2 : head_dim == 80 ? EXPERTS
            : head_dim == 96 ? DELTA : QWEN3;
        const int bits = head_dim % 32 ? 8 : 32;
        uint64_t same = rng;
        float *expected = NULL;
        for (int batch = 1; batch <= 60; batch += batch < 3 ? 1 : 19) {
            rng = same;
            Model m = random_model(64, head_dim, kind);
            m.config.cache_bits = bits;
            float *logits = random_floats(60 * 77);
            Pass *p = random_pass(&m, 60);
            const int *blocks = scattered(p);
            for (int pos = 0; pos < 60; pos += batch) {
                int n = min_int(batch, 60 - pos);
                CHECK(forward_text(p, blocks, tokens + pos, n, pos, n));
                memcpy(logits + pos * 77, classify(p, n), n * 77 * sizeof(float));
            }
            if (expected) CHECK(!memcmp(logits, expected, 60 * 77 * sizeof(float)), "batch %d", batch);
            expected = logits;
        }
        for (int i = 0; i < 60 * 77; i++) CHECK(isfinite(expected[i]));
    }
}

// Where Part I has element i of a state of one layer: Part III has blocks of columns of S
static size_t index_in_layer(const Config *c, size_t i) {
    const size_t blocks = DELTA_DIM / COLUMNS, block = i / (COLUMNS * DELTA_DIM), row = i / COLUMNS % DELTA_DIM;
    if (i >= (size_t)c->delta_v_dim * DELTA_DIM) return i;
    return (block / blocks * DELTA_DIM + row) * DELTA_DIM + block % blocks * COLUMNS + i % COLUMNS;
}

static size_t index_of_state(const Config *c, size_t i) {
    return i - i % layer_state(c) + index_in_layer(c, i % layer_state(c));
}

// Layers of all kinds of models, bit for bit as forward() defines them; cache and states, too; then the logits
static void test_layers(void) {
    for (int i = 0; i < 2 * (DELTA + 1); i++) {
        for (int n = 1; n <= 40; n += 13) {
            const Kind kind = i / 2;
            Model m = random_model(32, kind == QWEN2 ? 48 : 64, kind);
            m.config.cache_bits = i % 2 ? 8 : 32;
            Pass *p = random_pass(&m, 40);
            const Config *c = &m.config;
            const int *blocks = scattered(p);
            const size_t size = state_size(c);
            float *state = random_floats(size), *saved = random_floats(size), *before = random_floats(size);
            for (int l = 0; l < c->n_layers; l++)
                if (!m.weights.layers[l].conv) fill_cache(start_layer(p, l, 0), blocks, 300);
            for (size_t j = 0; j < size; j++) m.state.delta[index_of_state(c, j)] = state[j];
            for (int t = 0; t < n; t++) {
                p->rows[t] = (Row){.token = below(77), .pos = 250 + t, .blocks = blocks, .needed = true,
                                   .state = state, .saved = t == n / 2 ? saved : NULL};
            }
            CHECK(forward_rows(p, n));
            const float *logits = classify(p, n);
            for (int t = 0; t < n; t++, logits += 77) {
                const Row *row = &p->rows[t];
                CHECK(forward(&m, row->token, row->pos));
                if (t == n / 2) memcpy(before, m.state.delta, size * sizeof(float));
                CHECK(!memcmp(p->x + t * c->dim, m.state.x, c->dim * sizeof(float)), "row %d", t);
                CHECK(!memcmp(logits, compute_logits(&m), 77 * sizeof(float)), "kind %d, row %d", kind, t);
            }
            for (size_t j = 0; j < size; j++) {
                CHECK(state[j] == m.state.delta[index_of_state(c, j)], "rows %d, state %zu", n, j);
                CHECK(saved[j] == before[index_of_state(c, j)], "rows %d, saved %zu", n, j);
            }
            for (int i = 0; i < 2 * 300 * c->kv_dim; i++) {
                const int l = i / (300 * c->kv_dim) * (c->n_layers / 2) + (kind == DELTA), pos = i / c->kv_dim % 300, h = i / c->head_dim % c->n_kv_heads;
                const size_t pair = m.weights.layers[l].number * c->n_kv_heads + h;
                const Row at = {.pos = pos, .blocks = blocks};
                const int j = i % c->head_dim;
                CHECK(number_of(p, pair, &at, j, false) == in_cache(&m, m.state.keys, l, pos, h)[j], "layer %d, position %d", l, pos);
                CHECK(number_of(p, pair, &at, j, true) == in_cache(&m, m.state.values, l, pos, h)[j], "layer %d, position %d", l, pos);
            }
        }
    }
}

// The choice of experts by sorting, the first of equal ones first
static void test_choose_experts(void) {
    for (int trial = 0; trial < 400; trial++) {
        const Config c = {.n_experts = 7, .n_experts_used = 3, .no_topk_norm = trial % 2};
        float *p = random_floats(7), share[7];
        double likely[7], total = 0, chosen = 0;
        int order[7], n_before = 0;
        p[5] = p[2];
        for (int e = 0; e < 7; e++) {
            total += likely[e] = exp(p[e]);
            int at = e;  // insertion sort, stable
            for (; at > 0 && likely[order[at - 1]] < likely[e] * (1 - 1e-6); at--) order[at] = order[at - 1];
            order[at] = e;
        }
        for (int i = 0; i < 3; i++) chosen += likely[order[i]];
        CHECK(choose_experts(&c, p, share));
        for (int e = 0; e < 7; e++) {
            const bool yes = e == order[0] || e == order[1] || e == order[2];
            const double expected = !yes ? 0 : likely[e] / (c.no_topk_norm ? total : chosen);
            CHECK(fabs(share[e] - expected) < 1e-4 * expected + 1e-30, "expert %d", e);
            n_before += share[e] > 0;
        }
        CHECK(n_before == 3);
    }
}

static void experts_job(void *pass) {
    const Worker *me = worker_at_layer(pass);
    norm_all(me, me->w->rms_ffn);
    choose_all(me);
    swiglu_all(me);
    EACH (g, me->c->dim / me->c->group_size, 1) add_outputs(me, g * me->c->group_size);
}

// A NaN of either sign, an infinity: the token has no experts, and its x says so.
static void test_experts_not_finite(void) {
    const float bad[] = {NAN, -NAN, INFINITY};
    for (int i = 0; i < 3 * 7; i++) {
        float *term = random_floats(7), share[7];
        const Config c = {.n_experts = 7, .n_experts_used = 3};
        term[i % 7] = bad[i / 7];
        CHECK(!choose_experts(&c, term, share), "%d", i);
        for (int e = 0; e < 7; e++) CHECK(share[e] == 0);
    }
    Model m = random_model(32, 32, EXPERTS);
    Pass *p = random_pass(&m, 20);
    Worker *me = start_layer(p, 0, 20);
    memcpy(p->x, random_floats(20 * m.config.dim), 20 * m.config.dim * sizeof(float));
    p->x[5 * m.config.dim + 3] = -INFINITY;
    on_all_threads(experts_job, p);
    for (int t = 0; t < 20; t++) CHECK(isfinite(p->x[t * m.config.dim]) == (t != 5), "token %d", t);
    CHECK(me->place[p->n_chosen] == 19 * 3);
}

enum { LOOPS = 9, ITEMS = 1000 };

typedef struct {
    struct { int n, chunk; } loops[LOOPS];
    int lazy;  // a thread of a higher number leaves before the last loops
    _Atomic int counts[LOOPS][ITEMS], done[LOOPS], wrong, inside;
} Counting;

// Counts each item of each loop, and what is wrong: a slice that is none, or one that begins before
// the last loop is done.
static void count_job(void *arg) {
    Counting *c = arg;
    c->inside++;
    for (int l = 0; l < LOOPS; l++) {
        const int n = c->loops[l].n, chunk = c->loops[l].chunk;
        if (thread > c->lazy && l > thread) break;
        SLICES (s, n, chunk) {
            c->wrong += s.begin % chunk || s.begin >= s.end || s.end > n || (l > 0 && c->done[l - 1] != c->loops[l - 1].n);
            for (int i = s.begin; i < s.end; i++) c->counts[l][i]++;
            c->done[l] += s.end - s.begin;
            if (n % 100 == 99) usleep(50);  // the others go on to the next loop, or sleep
        }
        c->wrong += thread > 0 && thread >= n_threads;
    }
    c->inside--;
}

// Each item of each loop runs once, and the job ends, with loops of no item, and with threads that come
// late, sleep or leave early.
static void test_threads(void) {
    static Counting c;
    for (int trial = 0; trial < 1000; trial++) {
        memset((void *)&c, 0, sizeof(c));
        c.lazy = trial % 4 ? n_threads : below(n_threads);
        for (int l = 0; l < LOOPS; l++) {
            c.loops[l].n = below(4) ? below(ITEMS + 1) : below(3);
            c.loops[l].chunk = 1 + below(50);
        }
        if (trial % 50 == 0) usleep(2000);  // the workers fall asleep
        on_all_threads(count_job, &c);
        CHECK(c.wrong == 0 && c.inside == 0, "trial %d", trial);
        for (int l = 0; l < LOOPS; l++) {
            for (int i = 0; i < ITEMS; i++) CHECK(c.counts[l][i] == (i < c.loops[l].n), "loop %d, item %d", l, i);
        }
    }
    Slice s = {0};  // one thread alone runs a loop as well
    for (int end = 0; next_slice(&s, 77, 5); end = s.end) CHECK(s.begin == end && s.end > end && s.end <= 77);
}

static void test_rope(void) {
    float x[8], y[8], cos[4], sin[4];
    for (int i = 0; i < 8; i++) x[i] = y[i] = (float)uniform();
    for (int j = 0; j < 4; j++) cos[j] = cosf(j + 1), sin[j] = sinf(j + 1);
    rope(x, cos, sin, 4);
    for (int j = 0; j < 4; j++) {
        CHECK(fabsf(x[j] - (y[j] * cosf(j + 1) - y[j + 4] * sinf(j + 1))) < 1e-6);
        CHECK(fabsf(x[j + 4] - (y[j] * sinf(j + 1) + y[j + 4] * cosf(j + 1))) < 1e-6);
    }
    norm_and_rope(&(Config){.head_dim = 8, .rotary_dim = 4}, x, NULL, cos, sin);  // the rest stays as it is
    for (int j = 4; j < 8; j++)
        CHECK(fabsf(x[j] - (y[j - 4] * sinf(j - 3) + y[j] * cosf(j - 3))) < 1e-6);
}

// Of the file where rope is scaled, else theta's
static void test_frequencies(void) {
    const float freq[] = {0.25f, 0, 1e-9f, 3};
    Config g = {.head_dim = 24, .rotary_dim = 8, .rope_theta = 1e4f};
    for (int j = 0; j < 4; j++) {
        CHECK(fabs(rope_frequency(&g, j) / pow(1e4, -2.0 * j / 8) - 1) < 1e-6, "j %d", j);
    }
    g.rope_scaling = 2, g.rope_freq = freq;
    for (int j = 0; j < 4; j++) CHECK(rope_frequency(&g, j) == freq[j], "j %d", j);
    Model m = random_model(32, 32, QWEN3);
    rope_angles(&m.config, 0, m.state.cos, m.state.sin);
    CHECK(m.state.cos[0] == 1);
    m.config.rope_scaling = 2, m.config.rope_factor = 1.25f, m.config.rope_freq = random_floats(64);
    rope_angles(&m.config, 0, m.state.cos, m.state.sin);
    CHECK(m.state.cos[0] == 1.25f && m.state.sin[0] == 0);
}

static Sampler random_sampler(float temperature, float top_p, int top_k) {
    return (Sampler){.temperature = temperature, .top_p = top_p, .top_k = top_k, .rng = 7,
                     .repetition = 1, .in_answer = alloc(1000, 1, ""), .seen = alloc(1000, 1, "")};
}

typedef struct { float temperature, top_p; int top_k; } Sampling;

// The probability of each of n tokens, after sorting everything
static void expected_shares(double *share, const float *logits, int n, Sampling c) {
    int *order = alloc(n, sizeof(int), "a test"), k = c.top_k ? c.top_k : n, kept = 0;
    double sum = 0, mass = 0;
    for (int i = 0; i < n; i++) {  // insertion sort, stable: the lowest id first
        int at = i;
        for (; at > 0 && logits[order[at - 1]] < logits[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    for (int i = 0; i < n; i++) share[i] = 0;
    for (int i = 0; i < k; i++) sum += exp(logits[order[i]] / c.temperature);
    for (; kept < k && mass < c.top_p * sum; kept++) {
        mass += share[order[kept]] = exp(logits[order[kept]] / c.temperature);
    }
    for (int i = 0; i < n; i++) share[i] /= mass;
}

// The share of each token over many draws, against its probability
static void test_sampler(void) {
    const Sampling cases[] = {
        {1, 1, 0}, {0.7f, 1, 0}, {1, 0.8f, 0}, {1, 1, 5}, {0.7f, 0.8f, 20}, {2, 0.3f, 7}, {1, 1e-6f, 0}};
    enum { N = 50, DRAWS = 40000 };
    for (size_t c = 0; c < sizeof(cases) / sizeof(*cases); c++) {
        Sampler s = random_sampler(cases[c].temperature, cases[c].top_p, cases[c].top_k);
        float logits[N], copy[N];
        double kept[N];
        int count[N] = {0};
        for (int i = 0; i < N; i++) {
            logits[i] = (float)(3 * uniform());
            if (i % 10 == 9) logits[i] = logits[i - 1];  // ties
        }
        expected_shares(kept, logits, N, cases[c]);
        for (int i = 0; i < DRAWS; i++) {
            memcpy(copy, logits, sizeof(copy));
            count[sample(&s, copy, N)]++;
        }
        for (int i = 0; i < N; i++) {
            double share = count[i] / (double)DRAWS, sigma = sqrt(kept[i] * (1 - kept[i]) / DRAWS);
            CHECK(fabs(share - kept[i]) <= 5 * sigma, "case %zu, id %d: %g, not %g", c, i, share, kept[i]);
        }
    }
    Sampler half = random_sampler(1, 0.5f, 0);
    for (int i = 0; i < 200; i++) {
        int id = sample(&half, (float[]){2, 2, 2, 2}, 4);
        CHECK(id < 2, "id %d, but 0 and 1 reach the half", id);
    }
    Sampler greedy = random_sampler(0, 0.8f, 20);
    CHECK(sample(&greedy, (float[]){1, 3, 3, 2}, 4) == 1);
    greedy.presence = 1.5f;
    greedy.in_answer[1] = greedy.in_answer[2] = true;
    CHECK(sample(&greedy, (float[]){1, 3, 3, 2}, 4) == 3);
}

// Many tokens, half of them equal to others: none is drawn that is not kept, and the share of ids up
// to each one is as expected (the Kolmogorov-Smirnov test).
static void test_large_vocabulary(void) {
    const Sampling cases[] = {{1, 1, 0}, {0.6f, 0.95f, 0}, {1.5f, 0.8f, 0}, {1, 1, 1500}, {2, 0.5f, 2999},
                              {0.7f, 0.8f, 20}, {100, 0.9f, 0}, {1, 1, 1}, {1, 1, 2}, {1, 1, 3}, {1, 1, 4}};
    enum { N = 3000, DRAWS = 2000 };
    static float logits[N], copy[N];
    static double expected[N];
    for (size_t c = 0; c < sizeof(cases) / sizeof(*cases); c++) {
        Sampler s = random_sampler(cases[c].temperature, cases[c].top_p, cases[c].top_k);
        int count[N] = {0};
        double drawn = 0, sum = 0, most = 0;
        for (int i = 0; i < N; i++) logits[i] = (float)(below(1500) / 250.0);
        expected_shares(expected, logits, N, cases[c]);
        for (int i = 0; i < DRAWS; i++) {
            memcpy(copy, logits, sizeof(copy));
            count[sample(&s, copy, N)]++;
        }
        for (int i = 0; i < N; i++) {
            CHECK(count[i] == 0 || expected[i] > 0, "case %zu, id %d is not kept", c, i);
            drawn += count[i] / (double)DRAWS;
            sum += expected[i];
            most = fmax(most, fabs(drawn - sum));
        }
        CHECK(most < 2 / sqrt(DRAWS), "case %zu: %g", c, most);
    }
}

// Against doubles; logits far apart and close together, large ones too
static void test_surprise(void) {
    enum { N = 1003 };
    for (int trial = 0; trial < 200; trial++) {
        float logits[N];
        double spread = pow(10, trial % 4 - 1), shift = 100 * uniform(), sum = 0;
        for (int i = 0; i < N; i++) logits[i] = (float)(shift + spread * uniform());
        int id = below(N);
        for (int i = 0; i < N; i++) sum += exp(logits[i] - (double)logits[id]);
        const double logit = logits[id], found = log_sum_exp(logits, N) - logit;
        CHECK(fabs(found - log(sum)) < 1e-6 * (1 + log(sum)), "%.9g, not %.9g", found, log(sum));
    }
}

// Naively: all places before are compared, and the count is made again for each id. Texts that go round
// in circles of a few ids, now and then with others; </think> comes and goes; the prompt is not watched.
static void test_repeats(void) {
    enum { N = 1200, THINKS = 9 };
    int ends = 0, restarts = 0;
    for (int trial = 0; trial < 60; trial++) {
        static int ids[N];
        const int period = 1 + below(60), noise = 1 + below(400), n_prompt = 1 + below(30);
        const Tokenizer tok = {.end_think = THINKS};
        Slot slot = {.watched = trial % 8 ? (size_t)n_prompt : SIZE_MAX / 2};
        Text text = {.ids = {ids, 0, N}, .n_prompt = n_prompt, .slot = &slot};
        int start = trial % 8 ? n_prompt : N, count = 0;
        bool before = false;  // </think>
        for (int n = 0; n < N; n++) {
            ids[n] = n < period ? below(3) : below(noise) ? ids[n - period] : below(THINKS + 1);
            if (n < n_prompt) continue;
            text.ids.n = n + 1;
            int times = 0;
            for (int at = start; at + 8 <= n; at++) times += !memcmp(ids + at, ids + n - 7, 8 * sizeof(int));
            count = n - 7 >= start && times >= 3 ? count + 1 : max_int(count - 3, 0);
            if (start < N && ids[n] == THINKS && !before) count = 0, start = n + 1, before = true, restarts++;
            const bool found = watch_repeats(&tok, &text);
            CHECK(found == (count >= 256) && slot.repeats == count, "trial %d, id %d: %d, not %d", trial, n,
                  slot.repeats, count);
            if (!found) continue;
            ends++;
            break;
        }
    }
    CHECK(ends > 5 && restarts > 5, "%d ends, %d restarts", ends, restarts);
}

// HF's repetition penalty comes first: 3 / 1.2 - 0.25, -3 * 1.2 - 0.25; 0 stays.
static void test_penalties(void) {
    Sampler s = random_sampler(0, 1, 0);
    float logits[] = {3, 3, -3, -3, 0, 3};
    s.repetition = 1.2f;
    s.presence = 0.25f;
    s.seen[0] = s.seen[2] = s.seen[4] = s.seen[5] = s.in_answer[2] = s.in_answer[5] = true;
    penalize(&s, logits, 6);
    const float expected[] = {3 / 1.2f, 3, -3 * 1.2f - 0.25f, -3, 0, 3 / 1.2f - 0.25f};
    for (int i = 0; i < 6; i++) CHECK(logits[i] == expected[i], "%d: %g", i, logits[i]);
}

// Naively: the ids that followed the last NGRAM ids at the latest earlier place, repeated if they end
static void test_draft(void) {
    for (int trial = 0; trial < 3000; trial++) {
        int ids[80], n = NGRAM + below(60), most = below(2 * TILE_TOKENS), from = n - 1;
        int users[80] = {0}, blocks[80], limit = below(3);  // what limits the draft
        Pass pass = {.block_len = 1};
        Engine e = {.pass = &pass, .users = users, .n_unused = limit == 1 ? most : 80 - n};
        Slot slot = {.own.blocks.p = blocks};
        Text a = {.ids = {ids, n, 80}, .slot = &slot, .context = limit == 0 ? n + most : 80, .max_ids = 80};
        for (int i = 0; i < n; i++) ids[i] = below(2);
        e.n_unused += n;
        take_blocks(&e, &a, 0, 0);
        for (int i = n; i < 80; i++) ids[i] = -1;
        for (int same = 0; from >= NGRAM; from--) {
            for (same = 0; same < NGRAM && ids[from - 1 - same] == ids[n - 1 - same];) same++;
            if (same == NGRAM) break;
        }
        if (limit > 0) most = min_int(most, 80 - n);
        const int asked = limit == 2 ? most : 80;
        draft_text(&e, &a, n % 2 ? asked : 80, n % 2 ? 80 : asked);
        CHECK(slot.guesses == (from >= NGRAM ? most : 0), "%d guesses, not %d", slot.guesses, most);
        CHECK(e.credit == -slot.guesses * DRAFT_COST && slot.own.blocks.n == n + slot.guesses);
        for (int i = 0; i < slot.guesses; i++) CHECK(ids[n + i] == ids[from + i % (n - from)]);
        for (int i = n + slot.guesses; i < 80; i++) CHECK(ids[i] == -1);
    }
}

// An engine for one text at a time
static void start_engine(Engine *e, const Sampler *sampler) {
    static Writer writer;
    writer.held.p = grow(writer.held.p, &writer.held.cap, 0, 100, 1);
    e->most_texts = 1;
    e->n_running = e->n_texts = 0;
    prepare_passes(e, 200);
    hash_at(e, 0, 0);  // allocates it
    e->order[0] = &e->places[0];
    e->places[0] = (Text){.sampler = *sampler, .writer = &writer, .slot = &e->slots[0]};
    e->slots[0].own.prompt.p = grow(NULL, &e->slots[0].own.prompt.cap, 0, 200, sizeof(int));
}

typedef struct {
    Ids ids[2], cached[2];  // of two turns
    Ending ending[2];
    size_t reused[2];
    uint64_t rng;
    int passes[2];
} Answers;

// Two turns, the second goes on from the first.
static Answers answer_twice(Engine *e, const Sampler *sampler, const Ids *prompt) {
    Answers all = {.rng = sampler->rng};
    Ids ids = {0};
    e->credit = 0;  // one draft: what comes after it has to be earned
    for (int i = 0; i < 2; i++) {
        cut_blocks(e, &e->kept[i].blocks, 0);
        e->kept[i].n = 0;
    }
    e->places[0].sampler = *sampler;
    CHECK(e->n_unused == e->pass->n_blocks);
    for (int turn = 0; turn < 2; turn++) {
        for (size_t i = 0; i < prompt->n; i++) ids_add(&ids, prompt->p[i]);
        Text *a = add_text(e, &ids, all.rng, false);
        all.passes[turn] = -1;  // but the prompt's
        const int before = allocations;
        while (a->ending == GOES_ON && run_pass(e)) all.passes[turn] += e->pass->n_needed > 0;
        CHECK(allocations == before, "%d while decoding", allocations - before);
        all.reused[turn] = a->slot->cached;
        all.ending[turn] = a->ending;
        all.rng = a->sampler.rng;
        remove_text(e, a);
        for (size_t i = 0; i < a->n_run; i++) ids_add(&all.cached[turn], a->ids.p[i]);
        for (size_t i = a->n_prompt; i < a->ids.n; i++) ids_add(&all.ids[turn], a->ids.p[i]);
        for (size_t i = a->n_prompt; i < a->ids.n; i++) ids_add(&ids, a->ids.p[i]);
        if (ids.n + prompt->n > (size_t)e->model.context) break;
    }
    free(ids.p);
    return all;
}

// Drafts change the number of forward passes, and nothing else: the answers, how they end, what is
// left in the cache for the next turn, and the random numbers used are those of single steps. With
// states, most guesses are ids that single steps drew, and the last pass's right ones need not be left.
static void test_drafts(Kind kind) {
    static Engine e[2];
    int passes[2] = {0}, endings[FAILED + 1] = {0};
    for (int k = 0; k < 2; k++) {
        rng = 78;  // whose model repeats itself
        e[k] = (Engine){.model = random_model(32, kind == DELTA ? 64 : 8, kind)};
        e[k].pass = random_pass(&e[k].model, k ? 16 : 1);
        int vocab_size = e[k].model.config.vocab_size;
        e[k].tokenizer = (Tokenizer){.vocab_size = vocab_size, .think = -1, .end_think = -1,
                                     .text = alloc(vocab_size, sizeof(Bytes), "a test"),
                                     .kind = alloc(vocab_size, 1, "a test")};
    }
    e[1].pass->logit_rows = min_int(16, 2 * TILE_TOKENS);
    Sampler sampler = random_sampler(0, 1, 0);
    sampler.in_answer = alloc(77, sizeof(bool), "a test");
    sampler.seen = alloc(77, sizeof(bool), "a test");
    for (int k = 0; k < 2; k++) start_engine(&e[k], &sampler);
    for (int trial = 0; trial < 200; trial++) {
        int prompt_ids[20], stop = below(77);
        Ids prompt = {prompt_ids, 1 + below(20), 20};
        for (size_t i = 0; i < prompt.n; i++) prompt_ids[i] = below(77);
        sampler.temperature = trial % 4 ? 2.0f * (float)random_next(&rng) : 0;
        sampler.top_k = below(2) * 2;
        sampler.presence = below(4) ? 0 : 0.5f;
        sampler.repetition = below(4) ? 1 : 1.05f;
        sampler.rng = trial;
        int n = below(2) ? -1 : below(60), context = below(2) ? 100 : 20 + below(80);
        Answers a[2];
        for (int k = 0; k < 2; k++) {
            e[k].options.n = n;
            e[k].model.context = context;
            e[k].tokenizer.stop = (Ids){&stop, trial % 3 == 0, 1};
            guesses = k && kind == DELTA ? trial + 1 : 0;  // see guess_any
            a[k] = answer_twice(&e[k], &sampler, &prompt);
            passes[k] += a[k].passes[0] + a[k].passes[1];
        }
        CHECK(a[0].rng == a[1].rng, "trial %d", trial);
        for (int turn = 0; turn < 2; turn++) {
            CHECK(a[0].ending[turn] == a[1].ending[turn], "trial %d, turn %d", trial, turn);
            CHECK(same_ids(&a[0].ids[turn], &a[1].ids[turn]), "trial %d, turn %d", trial, turn);
            Ids *left = &a[0].cached[turn];
            const size_t reused = a[0].reused[turn] - a[1].reused[turn], missing = left->n - a[1].cached[turn].n;
            left->n -= missing;
            CHECK(same_ids(left, &a[1].cached[turn]), "trial %d, turn %d", trial, turn);
            CHECK(!(missing || reused) || kind == DELTA, "trial %d, turn %d", trial, turn);
            endings[a[0].ending[turn]]++;
            for (int k = 0; k < 2; k++) free(a[k].ids[turn].p), free(a[k].cached[turn].p);
        }
    }
    CHECK(endings[COMPLETE] && endings[LIMIT_REACHED] && endings[CONTEXT_ENDED]);
    CHECK(passes[1] < passes[0] * (kind == DELTA ? 0.5 : 0.85), "%d passes, not %d", passes[1], passes[0]);
    guesses = 0;
    e[1].credit = 0;  // drafts that are always wrong: one in DRAFT_COST passes for each token
    e[1].options.n = -1;
    e[1].model.context = 100;
    int zeros[50] = {0}, drafts = 0;
    Text *a = add_text(&e[1], &(Ids){zeros, 49, 49}, 0, false);
    start_texts(&e[1]);
    ids_add(&a->ids, 0);  // was drawn
    a->n_run = 49;
    a->target = 50;
    for (int pass = 1; pass <= 5000; pass++) {
        schedule(&e[1]);
        draft_texts(&e[1]);
        CHECK(a->slot->guesses == 0 || a->slot->guesses == TILE_TOKENS - 1, "%d ids", a->slot->guesses);
        drafts += a->slot->guesses > 0;
    }
    CHECK(drafts == 1 + 5000 / (DRAFT_COST * (TILE_TOKENS - 1)), "%d drafts", drafts);
}

#if !defined(_WIN32) && !defined(__SANITIZE_THREAD__)  // the program's own handler writes in its main thread
static void *press_later(void *microseconds) {
    usleep(*(int *)microseconds);
    interrupted = 1;
    return NULL;
}

// Ctrl-C within a pass of a chat's prompt, of `batch` rows at most: what ran before it is kept, and the
// answer is the same.
static void test_stopped_prompt(int batch) {
    static Engine e;
    int ids[70], later, whole = 0, first = -1;
    double took = 0;
    rng = 5;
    e = (Engine){.model = random_model(32, 64, DELTA), .tokenizer = {.vocab_size = 77, .think = -1, .end_think = -1,
                 .text = alloc(77, sizeof(Bytes), "a test"), .kind = alloc(77, 1, "a test")},
                 .options.n = 1, .dialogue = true};
    e.model.context = 200;
    e.pass = random_pass(&e.model, batch);
    Sampler sampler = random_sampler(0, 1, 0);
    sampler.in_answer = alloc(77, sizeof(bool), "a test");
    sampler.seen = alloc(77, sizeof(bool), "a test");
    start_engine(&e, &sampler);
    for (int i = 0; i < 70; i++) ids[i] = below(77);
    for (int trial = 0; trial < 500 && whole < 3; trial++) {
        pthread_t thread;
        const double began = now();
        for (int i = 0; i < 2; i++) {
            cut_blocks(&e, &e.kept[i].blocks, 0);
            e.kept[i].n = 0;
        }
        Text *t = add_text(&e, &(Ids){ids, 70, 70}, 0, false);
        later = (int)(random_next(&rng) * took * 1e6);
        if (trial) CHECK(!pthread_create(&thread, NULL, press_later, &later));
        while (t->ending == GOES_ON && run_pass(&e)) {}
        const size_t n_run = t->ending == GOES_ON && t->n_run < 70 ? t->n_run : 0;  // of 70 none is left to run
        if (!trial) took = now() - began;
        if (trial) pthread_join(thread, NULL);
        interrupted = 0;
        remove_text(&e, t);
        t = add_text(&e, &(Ids){ids, 70, 70}, 0, false);
        while (t->ending == GOES_ON && run_pass(&e)) {}
        CHECK(n_run == 0 || t->slot->cached == n_run, "%zu cached of %zu", t->slot->cached, n_run);
        if (first < 0) first = t->ids.p[70];
        CHECK(t->ids.p[70] == first, "%zu ran, %d, not %d", n_run, t->ids.p[70], first);
        whole += n_run > 0;
        remove_text(&e, t);
    }
    CHECK(whole == 3);
}
#else
static void test_stopped_prompt(int batch) { (void)batch; }
#endif

// A draft that overflows (its V is infinite) changes nothing: its token's row sees no later one.
static void test_draft_that_overflows(void) {
    enum { BAD = 70, N = 12 };
    float expected[77];
    for (int drafting = 0; drafting < 2; drafting++) {
        int context[N] = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4};
        static Engine e;
        e = (Engine){.options.n = -1};
        rng = 5;
        Model *m = &e.model;
        *m = random_model(32, 8, QWEN3);
        e.pass = random_pass(m, 16);
        float *column = (float *)m->weights.embedding.scales, *wv = (float *)m->weights.layers[0].wv.scales;
        for (int id = 0; id < 77; id++)     // the first group of x
            column[id / PANEL * 2 * PANEL + id % PANEL] = id == BAD ? 1 : 0;
        for (int row = 0; row < m->config.kv_dim; row++)  // which only V reads so
            wv[row / PANEL * 2 * PANEL + row % PANEL] = 3e38f;
        e.pass->logit_rows = min_int(16, 2 * TILE_TOKENS);
        Writer writer = {0};
        e.tokenizer = (Tokenizer){.vocab_size = 77, .think = -1, .end_think = -1,
                                  .text = (Bytes[77]){{0}}, .kind = (uint8_t[77]){0}};
        Sampler sampler = {.in_answer = (bool[77]){0}, .seen = (bool[77]){0}, .repetition = 1};
        start_engine(&e, &sampler);
        Text *a = add_text(&e, &(Ids){context, N, N}, 0, false);
        a->writer = &writer;
        CHECK(run_pass(&e) && e.pass->n_needed == 1 && a->ids.n == N + 1);
        a->ids.p[N] = 5;    // as if it had been drawn
        a->ids.p[5] = BAD;  // what 1 2 3 4 5 was followed by, as if it had run
        uint64_t hash = 0;
        for (int pos = 0, len = e.pass->block_len; pos < N; pos++) {
            hash = next_hash(hash, a->ids.p[pos]);
            *hash_at(&e, a->slot->own.blocks.p[pos / len], pos) = hash;
        }
        e.credit = drafting ? 10 * DRAFT_COST : -10 * DRAFT_COST;
        CHECK(run_pass(&e) && (a->slot->guesses > 0) == drafting);
        const float *logits = e.pass->logits;  // with temperature 0, drawing leaves them
        CHECK(a->n_run == N + 1 && a->ids.n == N + 2 && isfinite(sum_double(logits, 77)));
        if (drafting) CHECK(!memcmp(expected, logits, sizeof(expected)));
        memcpy(expected, logits, sizeof(expected));
    }
}

// A list, or a run, that could never go on ends with a message.
static void test_texts_that_cannot_run(void) {
#ifndef _WIN32
    int ends[2], status = 0;
    char said[200] = "";
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    if (child == 0) {
        static Engine e;
        const Sampler sampler = {.in_answer = (bool[77]){0}, .seen = (bool[77]){0}};
        dup2(ends[1], STDERR_FILENO);
        e.model = random_model(32, 8, QWEN3);
        e.pass = random_pass(&e.model, 4);
        e.tokenizer = (Tokenizer){.vocab_size = 77, .kind = (uint8_t[77]){0}};
        start_engine(&e, &sampler);
        e.n_unused = 0;
        for (int i = 0; i < e.pass->n_blocks; i++) e.users[i] = 1;  // nobody gives them back
        add_text(&e, &(Ids){(int[]){1, 2, 3}, 3, 3}, 0, false);
        run_pass(&e);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == EXIT_FAILURE, "%d", status);
    CHECK(read(ends[0], said, sizeof(said) - 1) > 0 && strstr(said, "qwen3: texts: 1 wait"), "%s", said);
    close(ends[0]), close(ends[1]);
#endif
}

// At far positions an angle is large; its cosine is that of the float product, as in transformers.
static void test_far_positions(void) {
    Model m = random_model(64, 64, QWEN3);
    for (int pos = 1; pos < 1 << 20; pos = pos * 3 + 1) {
        rope_angles(&m.config, pos, m.state.cos, m.state.sin);
        for (int j = 0; j < 32; j++) {
            double angle = (double)((float)pos * (float)pow(1e4, -2.0 * j / 64));
            CHECK(fabs(m.state.cos[j] - cos(angle)) < 4e-7 * angle + 1e-6, "%d, %d", pos, j);
            CHECK(fabs(m.state.sin[j] - sin(angle)) < 4e-7 * angle + 1e-6, "%d, %d", pos, j);
        }
    }
}

static void test_numbers(void) {
    for (int i = 0; i < 37; i++) {
        float *x = random_floats(37);
        CHECK(isfinite(sum_double(x, 37)));
        const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
        for (int j = 0; j < 4; j++) {
            x[i] = bad[j];
            CHECK(!isfinite(sum_double(x, 37)), "%g at %d", bad[j], i);
        }
    }
}

static void test_unfinished(void) {
    const struct { const char *text; size_t expected; } cases[] = {
        {"", 0}, {"a", 0}, {"\xC3", 1}, {"\xC3\xA9", 0}, {"a\xE2", 1}, {"a\xE2\x82", 2},
        {"\xE2\x82\xAC", 0}, {"\xF0\x9F\x99", 3}, {"\xF0\x9F\x99\x82", 0}, {"\xF0\x9F", 2},
        {"\x80", 0}, {"\x80\x80\x80", 0}, {"\xC0", 0}, {"\xC1", 0}, {"\xF5", 0}, {"\xFF", 0},
        {"\xE0\x80", 0}, {"\xE0\xA0", 2}, {"\xED\xA0", 0}, {"\xED\x9F", 2}, {"\xF0\x80", 0},
        {"\xF4\x90", 0}, {"\xF4\x8F", 2}, {"\xC3\xC3", 1}, {"\xE2\x82\xAC\x82", 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        CHECK(unfinished(bytes(cases[i].text), false) == cases[i].expected, "case %zu", i);
        CHECK(unfinished(bytes(cases[i].text), true) == cases[i].expected, "case %zu", i);
    }
    CHECK(unfinished(bytes("a\r"), true) == 1 && unfinished(bytes("a\r"), false) == 0);
    CHECK(unfinished(bytes("a\r\n"), true) == 0 && unfinished(bytes("\xC3\r"), true) == 1);
}

// What a terminal is shown: nothing that drives it, and nothing but UTF-8
static void test_printable(void) {
    static const struct { const char *text, *shown; } cases[] = {
        {"", ""}, {"a\tb\r\nc\n", "a\tb\r\nc\n"}, {"\033[2J", "\uFFFD[2J"}, {"a\rb\r", "a\uFFFDb\uFFFD"},
        {"\x7F\xC2\x9B", "\uFFFD\uFFFD"}, {"\u00A0\u00E9\u20AC\U0001F642", "\u00A0\u00E9\u20AC\U0001F642"},
        {"\x9B" "2J", "\uFFFD2J"}, {"\x80\x85\x9F", "\uFFFD\uFFFD\uFFFD"},
        {"\xFF\xC0\x80", "\uFFFD\uFFFD\uFFFD"},
        {"\xC3", "\uFFFD"}, {"\xE2\x82(\xF0\x9F\x99", "\uFFFD(\uFFFD"}, {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"}};
    Buffer shown = {0};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++, shown.n = 0) {
        add_printable(&shown, bytes(cases[i].text), true);
        CHECK(bytes_equal(bytes(cases[i].shown), bytes_of(&shown)), "case %zu: %.*s", i, (int)shown.n, shown.p);
    }
    add_printable(&shown, (Bytes){(uint8_t *)"\0\n", 2}, false);
    CHECK(shown.n == 6);
    free(shown.p);
}

static void test_utf8(void) {
    Tokenizer t = {.tables = alloc(1, sizeof(Tables), "")};
    Buffer b = {0};
    for (uint32_t c = 0; c < N_CHARS; c++) {
        if ((c >= 0xD800 && c < 0xE000) || (c >= BAD_BYTE && c < BAD_BYTE + 128)) continue;
        b.n = 0;
        add_char(&b, c);
        Char back = char_at(&t, (Bytes){b.p, b.n}, 0);
        CHECK(back.c == c && (size_t)back.n == b.n, "U+%X came back as %X", c, back.c);
    }
    const char *bad[] = {"\xC0\x80", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80",
                         "\xC3", "\xE2\x82", "\xF0\x9F\x99", "\xFF", "\x80"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        CHECK(char_at(&t, bytes(bad[i]), 0).c == (uint32_t)BAD_BYTE + (uint8_t)bad[i][0], "case %zu", i);
    }
}

// merge_piece against its definition: random vocabularies over up to three letters, some with equal scores, on
// random texts and runs.
static void test_merging(void) {
    enum { MERGES = 40, LONGEST = 300 };
    uint8_t text[256 + MERGES][8], s[LONGEST];
    Ids ids = {0}, expected = {0};
    Tables *tables = alloc(1, sizeof(Tables), "");
    for (int trial = 0; trial < 300; trial++) {
        Tokenizer t = {.tables = tables, .vocab_size = 256 + MERGES, .text = alloc(256 + MERGES, sizeof(Bytes), ""),
                       .priority = alloc(256 + MERGES, 4, ""), .kind = alloc(256 + MERGES, 1, "")};
        int letters = 1 + trial % 3;
        for (int id = 0; id < t.vocab_size; id++) {
            t.text[id] = (Bytes){text[id], id < 256 ? 1 : 2 + below(trial % 2 ? 3 : 6)};
            t.priority[id] = (float)-below(trial % 4 ? 100000 : 3);
            if (trial % 4 == 1) t.priority[id] = 50000 + t.priority[id];      // of either sign
            if (t.priority[id] == 0 && below(2)) t.priority[id] = -0.0f;      // equal to 0
            text[id][0] = (uint8_t)id;
            for (size_t i = 0; i < t.text[id].n && id >= 256; i++) text[id][i] = 'a' + below(letters);
            if (id >= 256 && trial % 5 == 0) t.priority[id] = (float)(256 - id);
        }
        index_tokens(&t, "a test");
        for (int round = 0; round < 20; round++) {
            Bytes piece = {s, 1 + below(LONGEST)};
            for (size_t i = 0; i < piece.n; i++) s[i] = round % 4 ? 'a' + below(letters) : 'a';
            ids.n = expected.n = 0;
            encode_piece(&t, piece, &expected);
            merge_piece(&t, piece, &ids);
            CHECK(same_ids(&ids, &expected), "trial %d, round %d, %zu bytes", trial, round, piece.n);
        }
    }
}

// Added tokens of two letters, in any order, some of which begin others: the longest wins. Ctrl-C ends
// the search.
static void test_added(void) {
    enum { TOKENS = 12, LONGEST = 40 };
    Tables *tables = alloc(1, sizeof(Tables), "");
    for (int trial = 0; trial < 300; trial++) {
        uint8_t s[LONGEST], letters[256 + TOKENS][8], kind[256 + TOKENS] = {0};
        float score[256 + TOKENS] = {0};
        Bytes text[256 + TOKENS], rest = {s, below(LONGEST)};
        Tokenizer t = {.tables = tables, .vocab_size = 256 + TOKENS, .text = text, .kind = kind, .priority = score};
        for (size_t i = 0; i < LONGEST; i++) s[i] = (uint8_t)('a' + below(2));
        for (int id = 0; id < 256 + TOKENS; id++) {
            text[id] = (Bytes){letters[id], id < 256 ? 1 : 2 + below(6)};
            letters[id][0] = (uint8_t)id;
            for (size_t i = 0; i < text[id].n && id >= 256; i++) letters[id][i] = (uint8_t)('a' + below(2));
            bool is_new = id >= 256;
            for (int other = 256; other < id; other++) is_new &= !bytes_equal(text[id], text[other]);
            if (is_new) kind[id] = ADDED | below(8) * SPECIAL;  // with NORMALIZED and A_WORD
        }
        index_tokens(&t, "a test");
        const int scope = trial % 3, normalized = trial % 2 ? NORMALIZED : 0;  // all; an answer's; a user's
        const int which = normalized | (scope == 0 ? ADDED : scope == 1 ? ANSWERED : ANSWERED | A_WORD);
        size_t at = 0, from = 0;
        for (int found = 0; found >= 0; from = at += found >= 0 ? text[found].n : 0) {
            int expected = -1;
            size_t there = from;
            for (; there < rest.n; there++) {
                for (int id = 256; id < t.vocab_size; id++) {
                    Bytes a = text[id];
                    bool counts = kind[id] && (scope == 0 || !(kind[id] & SPECIAL)) && (scope < 2 || kind[id] & A_WORD);
                    bool is_there = counts && (kind[id] & NORMALIZED) == normalized && a.n <= rest.n - there
                        && !memcmp(a.p, s + there, a.n);
                    if (is_there && (expected < 0 || a.n > text[expected].n)) expected = id;
                }
                if (expected >= 0) break;
            }
            found = added_next(&t, rest, &at, which);
            CHECK(found == expected && at == there, "trial %d: %d, not %d", trial, found, expected);
        }
        at = 0;
        interrupted = 1;
        CHECK(added_next(&t, rest, &at, ADDED) == -1 && at == 0);
        interrupted = 0;
    }
}

#ifdef __linux__
// Writes root/path, folders included.
static void put_file(const char *path, const char *text) {
    char name[512];
    snprintf(name, sizeof(name), "%s%s", root, path);
    for (char *c = name + 1; *c; c++) {
        if (*c != '/') continue;
        *c = 0;
        mkdir(name, 0700);
        *c = '/';
    }
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0) die("%s: %s", name, strerror(errno));
}

// What a cgroup's quota and shared cores leave of the CPUs, on made-up files of a system.
static void test_cores(void) {
#define V2 "/sys/fs/cgroup/"
    const struct { const char *group, *path, *text; int expected; } cases[] = {
        {"0::/\n", NULL, NULL, INT_MAX},
        {"0::/\n", V2 "cpu.max", "max 100000\n", INT_MAX},  // as a container sees its own
        {"0::/\n", V2 "cpu.max", "200000 100000\n", 2},
        {"0::/\n", V2 "cpu.max", "200001 100000\n", 3},
        {"0::/\n", V2 "cpu.max", "1000 100000\n", 1},
        {"0::/a/b c/d\n", V2 "a/b c/d/cpu.max", "700000 100000\n", 7},
        {"0::/a/b c/d\n", V2 "a/b c/cpu.max", "300000 100000\n", 3},  // of a group that this one is in
        {"0::/a/b c/d\n", V2 "a/cpu.max", "100000 100000\n", 1},
        {"0::/a/b\n", V2 "a/bc/cpu.max", "100000 100000\n", INT_MAX},
        {"0::/a\n", V2 "b/cpu.max", "700000 100000\n", INT_MAX}};
    char command[128];
    cpu_set_t set;
    const int cpus = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        strcpy(root, "/tmp/qwen3-test-XXXXXX");
        if (!mkdtemp(root)) die("%s: %s", root, strerror(errno));
        put_file("/proc/self/cgroup", cases[i].group);
        if (cases[i].path) put_file(cases[i].path, cases[i].text);
        const double limit = cgroup_limit("cpu.max");
        CHECK(fmin(ceil(limit), INT_MAX) == cases[i].expected, "case %zu: %g", i, limit);
        CHECK(cpu_count() == min_int(cpus, cases[i].expected), "case %zu: %d", i, cpu_count());
        put_file(V2 "memory.max", "max\n");
        CHECK(memory_size() > 1e8);
        put_file(V2 "memory.max", "12345678\n");
        CHECK(memory_size() == 12345678, "case %zu", i);
        put_file(V2 "a/memory.max", "2345678\n");
        CHECK((memory_size() == 2345678) == !strncmp(cases[i].group, "0::/a", 5), "case %zu", i);
        made_up = &set;
        CPU_ZERO(&set);
        for (int cpu = 0; cpu < 9; cpu++) CPU_SET(cpu, &set);
        CHECK(cpu_count() == min_int(9, cases[i].expected), "no topology");
        for (int cpu = 0; cpu < 8; cpu++) {  // pairs 0,4 1,5 2-3 6-7; 8 is unknown
            static const char *const siblings[8] = {"0,4", "1,5", "2-3", "2-3", "0,4", "1,5", "6-7", "6-7"};
            char path[128];
            snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
            put_file(path, siblings[cpu]);
        }
        CHECK(cpu_count() == min_int(5, cases[i].expected));
        CPU_CLR(0, &set);
        CPU_CLR(2, &set);
        CPU_CLR(3, &set);
        CHECK(cpu_count() == min_int(4, cases[i].expected), "4 alone is a core, too");
        made_up = NULL;
        snprintf(command, sizeof(command), "rm -r %s", root);
        CHECK(system(command) == 0);
    }
    CHECK(cgroup_limit("cpu.max") == INFINITY, "no such root");
    root[0] = 0;
    CHECK(cpu_count() >= 1);
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; CPU_COUNT(&one) == 0; cpu++) {
        if (CPU_ISSET(cpu, &set)) CPU_SET(cpu, &one);
    }
    sched_setaffinity(0, sizeof(one), &one);
    CHECK(cpu_count() == 1);
    sched_setaffinity(0, sizeof(set), &set);
}
#endif

// Ctrl-C before the new answer's first token: the old one stays.
static void test_stopped_retry(void) {
    static Engine engine;
    Conversation *talk = &engine.conversation;
    quiet = engine.dialogue = true;
    engine.model.context = 100;
    engine.sampling.temperature = 1;
    conversation_add(talk, USER, bytes("question"));
    conversation_add(talk, ASSISTANT, bytes("answer"));
    buffer_add(&engine.input, bytes("/retry"));
    Bytes text[256];
    for (int i = 0; i < 256; i++) text[i] = bytes("t");
    engine.tokenizer.text = text;
    engine.tokenizer.kind = (uint8_t[256]){0};
    engine.tokenizer.tables = alloc(1, sizeof(Tables), "");
    engine.tokenizer.tables->longest = 1;
    interrupted = 1;
    CHECK(run_message(&engine));
    interrupted = quiet = 0;
    CHECK(talk->n == 2 && bytes_equal(bytes_of(&talk->p[1].text), bytes("answer")));
}

// A conversation of one message and no turns, or none at all: there is nothing to forget.
static void test_forgetting_nothing(void) {
    Conversation talk = {0};
    conversation_drop(&talk, 0, 0);
    conversation_add(&talk, SYSTEM, bytes("s"));
    conversation_drop(&talk, 1, 1);
    CHECK(talk.n == 1 && talk.p[0].role == SYSTEM);
    conversation_drop(&talk, 0, 1);
    CHECK(talk.n == 0);
    free(talk.p);
}

// A second Ctrl-C ends the program only if the first had no effect for a second.
static void test_double_interrupt(void) {
    patience = 1;
    on_interrupt(SIGINT);
    on_interrupt(SIGINT);
    CHECK(interrupted, "interrupted");
#ifndef _WIN32
    const pid_t child = fork();
    int status = 0;
    if (child == 0) {
        nanosleep(&(struct timespec){1, 100000000}, NULL);
        on_interrupt(SIGINT);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == EXIT_INTERRUPT, "%d", status);
#endif
    interrupted = 0;
    patience = -1;
}

// A value of JSON in a line of its own, or not; if it is a string, its text
static void test_json(void) {
    const struct { const char *line, *text; } good[] = {
        {"\"\"", ""}, {" \"a b\"\t", "a b"}, {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\/\b\f\n\r\t"},
        {"\"\\u00e9\\u20AC\\ud83d\\ude42\"", "é€🙂"}, {"\"\\ud83d x\"", "\uFFFD x"}, {"\"\\ude42\\ud83d\"", "\uFFFD\uFFFD"},
        {"\"\\ud83d\\u0041\"", "\uFFFDA"}, {"\"\\ud83d\\ud83d\\ude42\"", "\uFFFD🙂"},
        {"[]", NULL}, {"{}", NULL}, {" [1, -0, 0.5, 1e9, -12.25E-3, 2e+1]", NULL}, {"true", NULL}, {"null", NULL},
        {"{\"a\": {\"b\": [false, \"]\"]}, \"a\": []}", NULL}};
    const char *bad[] = {"", " ", "\"", "\"a", "\"\\", "\"\\u", "\"\\u12", "\"\\u12g4\"", "\"\\x\"", "\"\n\"", "a", "[", "[1",
                         "[1,]", "[,]", "[1 2]", "{", "{\"a\"", "{\"a\":", "{\"a\":1", "{\"a\":1,}", "{a:1}", "{1:1}", "01",
                         "1.", ".5", "+1", "1e", "1e+", "-", "--1", "truer", "tru", "nul", "\"a\" b", "[]]", "\"\\u 123\"",
                         "\"\x80\"", "{\"\xC3\": 1}"};
    for (size_t i = 0; i < sizeof(good) / sizeof(*good); i++) {
        Buffer text = {0};
        Json j = {.rest = bytes(good[i].line), .text = &text};
        json_value(&j, 0);
        json_take_token(&j, "");
        CHECK(!j.error && j.rest.n == 0, "%s", good[i].line);
        if (good[i].text) CHECK(bytes_equal(bytes_of(&text), bytes(good[i].text)), "%s", good[i].line);
        free(text.p);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        Buffer text = {0};
        Json j = {.rest = bytes(bad[i]), .text = &text};
        json_value(&j, 0);
        json_take_token(&j, "");
        CHECK(j.error || j.rest.n, "%s", bad[i]);
        free(text.p);
    }
    for (int depth = 99; depth <= 101; depth++) {
        char line[203];
        memset(line, '[', depth);
        memset(line + depth, ']', depth);
        line[2 * depth] = 0;
        Json j = {.rest = bytes(line)};
        json_value(&j, 0);
        CHECK(!j.error == (depth <= 100), "%d levels", depth);
    }
}

static void test_json_messages(void) {
    static Tables tables = {.join = {(const uint8_t *)"\n", 1}};  // 2 MB
    const Tokenizer tok = {.tables = &tables};
    const struct { const char *line, *roles, *last; } cases[] = {  // NULL: an error
        {"[{\"role\":\"user\",\"content\":\"a\"}]", "u", "a"},
        {"[{\"content\":\"a\",\"x\":[{\"role\":1}],\"role\":\"user\"}]", "u", "a"},
        {"[{\"role\":\"system\",\"content\":\"s\"}, {\"role\":\"user\",\"content\":\"a\"} ]", "su", "a"},
        {"[{\"role\":1,\"role\":\"user\",\"content\":[],\"content\":\"a\",\"content\":\"b\"}]", "u", "b"},
        {"[{\"r\\u006fle\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"\"},{\"role\":\"user\",\"content\":\"c\"}]",
         "uau", "c"},
        {"[]", NULL, 0}, {"", NULL, 0}, {"[{}]", NULL, 0}, {"[{\"role\":\"user\"}]", "u", ""},
        {"[{\"content\":\"a\"}]", NULL, 0}, {"[{\"role\":\"user\",\"content\":\"a\"}", NULL, 0},
        {"[{\"role\":\"user\",\"content\":\"a\"},]", NULL, 0}, {"[{\"role\":\"tool\",\"content\":\"a\"}]", NULL, 0},
        {"[{\"role\":\"user\",\"content\":\"a\",\"content\":null}]", "u", ""},
        {"[{\"role\":\"user\",\"content\":\"a\",\"content\":false}]", NULL, 0},
        {"[{\"role\":\"user\",\"role\":2,\"content\":\"a\"}]", NULL, 0},
        {"[{\"role\":\"user\",\"content\":\"b\"},{\"role\":\"assistant\",\"content\":\"a\"}]", "ua", "a"},
        {"[{\"role\":\"user\",\"content\":[{\"text\":\"a\",\"type\":\"text\"},{\"type\":\"text\",\"text\":\"b\"}]}]",
         "u", "a\nb"},
        {"[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"text\":\"a\"}]}]", NULL, 0},
        {"[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"content\":\"a\"}]", NULL, 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        Conversation talk = {0};
        Buffer text = {0}, members_of = {0};
        Json j = {.rest = bytes(cases[i].line), .text = &text, .tok = &tok};
        json_line(&j, &talk, CHAT, &members_of);
        CHECK(!j.error == !!cases[i].roles, "%s", cases[i].line);
        for (size_t k = 0; cases[i].roles && k < strlen(cases[i].roles); k++) {
            CHECK(k < talk.n && "sua"[talk.p[k].role] == cases[i].roles[k], "%s", cases[i].line);
        }
        if (cases[i].roles && talk.n)
            CHECK(bytes_equal(bytes_of(&talk.p[talk.n - 1].text), bytes(cases[i].last)), "%s", cases[i].line);
        conversation_drop(&talk, 0, talk.n);
        free(talk.p);
        free(text.p);
    }
}

// A cache for many texts has a quarter of the memory at most, and at least the blocks of one text.
static void test_pool(void) {
    const Config c = {.n_kv_layers = 2, .n_kv_heads = 1, .head_dim = 64};
    const double room = memory_size() / 4 / (cell_at(&c, 1, 0) * sizeof(float));
    CHECK(pool_blocks(&c, 10 * LANES - 1, 3) == 30);
    CHECK(pool_blocks(&c, INT_MAX / 64 * 63, 32) == max_int((int)room, INT_MAX / 64 * 63 / LANES + 1));
    most_blocks = 25;
    CHECK(pool_blocks(&c, 10 * LANES, 3) == 25);
    CHECK(pool_blocks(&c, 30 * LANES, 3) == 30);
    most_blocks = INT_MAX;
}

// The end of input is the end, though a file has more later, which would be taken for lines: the rest of the last
// one, cut off, and others.
static void test_a_file_that_grows(void) {
    FILE *f = tmpfile();
    Lines in = {.fd = f ? fileno(f) : -1, .name = "a file", .most = 100};
    Bytes line;
    if (!f) die("tmpfile: %s", strerror(errno));
    fputs("one\nt", f);
    fflush(f);
    lseek(in.fd, 0, SEEK_SET);
    CHECK(next_line(&in, &line, true) && bytes_are(line, "one\n"));
    CHECK(next_line(&in, &line, true) && bytes_are(line, "t"));
    fputs("wo\nthree\n", f);
    fflush(f);
    lseek(in.fd, 5, SEEK_SET);
    CHECK(!next_line(&in, &line, true) && line.n == 0);
    CHECK(!next_line(&in, &line, false) && line.n == 0);
    free(in.data.p);
    fclose(f);
}

#ifndef _WIN32
// A Ctrl-C between the look at `interrupted` and the wait for input ends the wait.
static void test_ctrl_c_before_a_wait(void) {
    int ends[2];
    Buffer b = {0};
    if (pipe(ends) != 0) die("pipe: %s", strerror(errno));
    patience = 100;
    press_ctrl_c = 1;
    alarm(60);  // ends the tests if it waits
    CHECK(read_more(ends[0], &b) == -1 && interrupted);
    alarm(0);
    press_ctrl_c = 0;
    interrupted = 0;
    patience = -1;
    close(ends[0]);
    close(ends[1]);
    free(b.p);
}
#endif

static void test_not_finite(void) {
    Sampler s = random_sampler(1, 1, 0);
    CHECK(sample(&s, (float[]){1, NAN, 2}, 3) == -1 && sample(&s, (float[]){1, INFINITY, 2}, 3) == -1);
}

// Tokens are counted by ints: a text that could make more of them ends the program before it is cut.
static void test_too_many_tokens(void) {
#ifndef _WIN32
    for (int more = 0; more < 2; more++) {
        const pid_t child = fork();
        int status = 0;
        if (child == 0) {
            Tokenizer t = {.tables = alloc(1, sizeof(Tables), "")};
            Ids ids = {.n = (size_t)INT_MAX - 1 + more};
            Encoder enc = {.tok = &t, .out = &ids};
            interrupted = 1;  // nothing is normalized or cut into pieces
            fclose(stderr);
            encode_plain(&enc, bytes("abcd"));
            encode_flush(&enc);
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == more, "%d", status);
    }
#endif
}

// Several threads may be short of memory at once: one message, and one of them ends the program.
#ifdef __linux__  // macOS has no barriers
static void *die_together(void *barrier) {
    pthread_barrier_wait(barrier);
    die_memory("a test", 1e6);
    return NULL;
}

static void test_dying_together(void) {
    for (int trial = 0; trial < 20; trial++) {
        int ends[2], status = 0;
        char text[4096] = "";
        if (pipe(ends) != 0) die("pipe: %s", strerror(errno));
        const pid_t child = fork();
        if (child == 0) {
            pthread_barrier_t barrier;
            pthread_t thread;
            dup2(ends[1], STDERR_FILENO);
            pthread_barrier_init(&barrier, NULL, 8);
            for (int i = 0; i < 7; i++) pthread_create(&thread, NULL, die_together, &barrier);
            die_together(&barrier);
        }
        close(ends[1]);
        for (ssize_t n = 0, got; (got = read(ends[0], text + n, sizeof(text) - 1 - n)) > 0;) n += got;
        close(ends[0]);
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 1, "%d", status);
        CHECK(!strcmp(text, "qwen3: memory: not enough for a test, expected 1 MB\n"), "%s", text);
    }
}

// Ctrl-C while /file reads
static void test_file_stopped(void) {
    static Engine engine;
    char text[200] = "";
    int ends[2];
    const int saved = dup(STDERR_FILENO);
    CHECK(pipe(ends) == 0);
    buffer_add(&engine.input, bytes("/file tests/test.c"));
    interrupted = 1;
    dup2(ends[1], STDERR_FILENO);
    send_file(&engine, bytes_from(bytes_of(&engine.input), 6));
    dup2(saved, STDERR_FILENO);
    interrupted = 0;
    close(ends[1]);
    CHECK(read(ends[0], text, sizeof(text) - 1) > 0);
    CHECK(!strcmp(text, "qwen3: /file: stopped, nothing was sent\n"), "%s", text);
    close(ends[0]);
    close(saved);
    free(engine.input.p);
}
#endif

// What a list shows after ten seconds: the others take as long as those that have ended. Before one has ended, or if
// nobody knows how many there are, nobody knows.
#ifndef _WIN32
static void test_progress_of_a_list(void) {
    static Engine e;
    static List l = {.e = &e};
    static Slot slot;
    static Text oldest = {.slot = &slot};
    static const struct { size_t done, read; bool ended; int size, age; const char *shown; } cases[] = {
        {4, 10, true, 0, 0, "4 of 10 texts, @ tokens/s, 15 s left"},
        {9, 10, true, 0, 0, "9 of 10 texts, @ tokens/s, 1 s left"},
        {10, 10, true, 0, 0, "10 of 10 texts, @ tokens/s, 0 s left"},
        {4, 10, true, 0, 9, "4 of 10 texts, @ tokens/s, 15 s left"},  // the oldest of those that run is so old
        {9, 10, true, 0, 9, "9 of 10 texts, @ tokens/s, 9 s left"},
        {0, 10, true, 0, 9, "0 of 10 texts, @ tokens/s"},
        {4, 10, false, 4000, 0, "4 of about 20 texts, @ tokens/s, 40 s left"},
        {4, 10, false, 0, 0, "4 texts, @ tokens/s"},
        {0, 10, true, 0, 0, "0 of 10 texts, @ tokens/s"}};
    const int ours = posix_openpt(O_RDWR | O_NOCTTY), saved = dup(STDERR_FILENO);
    const char *name = ours >= 0 && !grantpt(ours) && !unlockpt(ours) ? ptsname(ours) : NULL;
    const int theirs = name ? open(name, O_RDWR | O_NOCTTY) : -1;
    FILE *list = tmpfile();
    if (theirs < 0 || !list) return;  // a system without terminals
    l.in.fd = fileno(list);
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        char text[200] = "", expected[200];
        l.read = cases[i].read;
        l.in.ended = cases[i].ended;
        CHECK(ftruncate(l.in.fd, cases[i].size) == 0, "%s", strerror(errno));
        l.in.taken = 2000;
        e.n_rows = 1000;
        e.order[0] = &oldest;
        e.n_texts = (int)(cases[i].read - cases[i].done);
        slot.start = now() - cases[i].age;
        progress = (struct Progress){.start = now() - 10};
        dup2(theirs, STDERR_FILENO);
        show_texts(&l);
        dup2(saved, STDERR_FILENO);
        // A terminal may pass on a line in parts.
        for (ssize_t n = 0, got = 1; got > 0 && !strstr(text, "\033[K"); n += got) {
            got = read(ours, text + n, sizeof(text) - 1 - n);
        }
        const char *end = strstr(text, " tokens/s"), *rate = end;
        while (rate && rate > text && rate[-1] != ' ') rate--;
        CHECK(end, "case %zu: %s", i, text);
        if (!end) continue;
        const char *at = strchr(cases[i].shown, '@') + 1;
        CHECK(fabs(atof(rate) * 10 - (double)e.n_rows) < 0.1 * (double)e.n_rows, "case %zu: %s", i, text);
        snprintf(expected, sizeof(expected), "\r%.*s%.*s%s\033[K", (int)(at - 1 - cases[i].shown), cases[i].shown,
                 (int)(end - rate), rate, at);
        CHECK(!strcmp(text, expected), "case %zu: %s", i, text + 1);
    }
    progress = (struct Progress){0};
    fclose(list);
    close(theirs);
    close(ours);
    close(saved);
}
#endif

// Of 2^30 ids, of which a hole in a file can be: row 31 of the logits is behind 2^31 floats.
static void test_far_logits(void) {
    static Engine e;
    static float logits;
    Pass pass = {.logits = &logits};
    e.pass = &pass;
    e.tokenizer.vocab_size = 1 << 30;
    CHECK((uintptr_t)logits_of(&e, 31) - (uintptr_t)&logits == 4 * 31ull << 30);
}

static int unit_tests(void) {
    test_double_interrupt();  // forks, so before there are threads
    test_too_many_tokens();   // too
    test_texts_that_cannot_run();  // too
#ifdef __linux__
    test_dying_together();    // too
#endif
    test_far_logits();
#ifndef _WIN32
    test_file_stopped();
    test_progress_of_a_list();
#endif
    // How attention is shared depends on the number of threads, which can only grow.
    for (int threads = 1; threads <= 3; threads += 2) {
        start_threads(threads);
        test_attention();
        test_attention_not_finite();
    }
    start_threads(5);  // more than cores here or there: the order of things varies
    test_stopped_retry();
    test_forgetting_nothing();
    test_exp();
    test_norm_softmax_silu();
    test_primitives();
    test_half_float();
    test_quantize();
    test_matmul();
    test_attention();
    test_attention_not_finite();
    test_attention_reads_nothing_later();
    test_attention_one_hot();
    test_batches();
    test_layers();
    test_choose_experts();
    test_experts_not_finite();
    test_threads();
    test_rope();
    test_frequencies();
    test_far_positions();
    test_sampler();
    test_large_vocabulary();
    test_surprise();
    test_penalties();
    test_repeats();
    test_draft();
    test_drafts(QWEN3);
    test_drafts(DELTA);
    test_stopped_prompt(24);
    test_stopped_prompt(3);  // shorter than a tile
    test_draft_that_overflows();
    test_numbers();
    test_unfinished();
    test_printable();
    test_utf8();
    test_merging();
    test_added();
    test_json();
    test_json_messages();
    test_pool();
    test_a_file_that_grows();
#ifndef _WIN32
    test_ctrl_c_before_a_wait();
#endif
    test_not_finite();
#ifdef __linux__
    test_cores();
#endif
    printf("tests/test (%s): %d checks, %d failures\n", SIMD, checks, failures);
    return failures > 0;
}

static bool next_record(char kind[16], Buffer *text) {
    size_t n;
    int c = getchar();
    while (c == '\n') c = getchar();
    if (c == EOF) return false;
    ungetc(c, stdin);
    if (scanf("%15s %zu", kind, &n) != 2 || getchar() != '\n' || n > INT_MAX)
        die("stdin: bad record, expected KIND BYTES");
    text->n = 0;
    text->p = grow(text->p, &text->cap, 0, n + 1, 1);
    text->n = fread(text->p, 1, n, stdin);
    if (text->n != n) die("stdin: record cut short, expected %zu bytes, found %zu", n, text->n);
    return true;
}

static void print_ids(const Ids *ids) {
    Buffer line = {0};
    buffer_add_ids(&line, ids, false);
    buffer_add(&line, bytes("\n"));
    write_stdout((Bytes){line.p, line.n});
    free(line.p);
}

static int print_tokens(const Tokenizer *t) {
    Buffer text = {0};
    Ids ids = {0};
    Encoder encoder = {.tok = t, .out = &ids};
    for (char kind[16]; next_record(kind, &text); ids.n = 0) {
        Bytes s = {text.p, text.n};
        if (!strcmp(kind, "marked")) encode_marked(&encoder, s);
        else if (!strcmp(kind, "plain")) encode_plain(&encoder, s);
        else encode_message(&encoder, s, !strcmp(kind, "answer") ? ASSISTANT : USER);
        encode_flush(&encoder);
        print_ids(&ids);
    }
    return EXIT_SUCCESS;
}

static int print_prompt(Engine *engine) {
    const Tokenizer *t = &engine->tokenizer;
    Conversation c = {0};
    Buffer text = {0};
    Ids ids = {0};
    for (char kind[16]; next_record(kind, &text);) {
        const int role = !strcmp(kind, "system") ? SYSTEM : !strcmp(kind, "user") ? USER : ASSISTANT;
        if (role == ASSISTANT && strcmp(kind, "assistant")) die("stdin: unknown kind \"%s\"", kind);
        conversation_add(&c, role, (Bytes){text.p, text.n});
    }
    prepare_answers(engine);
    render(t, &c, 0, engine->switched_on, &ids);
    print_ids(&ids);
    return EXIT_SUCCESS;
}

// Prints, as floats, the logits after each of the ids of stdin, which are one text.
static int print_logits(Pass *p) {
    const int *blocks = whole_cache(p);
    Ids ids = {0};
    for (int id; scanf("%d", &id) == 1;) ids_add(&ids, id);
    for (int pos = 0, count; pos < (int)ids.n; pos += count) {
        count = min_int((int)ids.n - pos, min_int(p->batch, p->logit_rows));
        if (!forward_text(p, blocks, ids.p + pos, count, pos, count)) return EXIT_FAILURE;
        const size_t n = (size_t)count * p->m->config.vocab_size;
        if (fwrite(classify(p, count), sizeof(float), n, stdout) != n) return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}

static const char *after_file;
static void save_after(void) {
    FILE *f = fopen(after_file, "wb");
    if (!f || fwrite(after, 1, sizeof(after), f) != sizeof(after) || fclose(f)) die("%s: not written", after_file);
}

static int run_small_pool(int argc, char **argv) {  // argv: BLOCKS[,SEED[,FILE]], and qwen3's arguments
    static Engine engine;
    const char *seed = strchr(argv[0], ',');
    most_blocks = atoi(argv[0]);
    if (seed) gives_up = guesses = strtoull(seed + 1, NULL, 10);
    if (seed && (after_file = strchr(seed + 1, ','))) {
        FILE *f = fopen(++after_file, "rb");
        if (f && fread(after, 1, sizeof(after), f) != sizeof(after)) die("%s: cut off", after_file);
        atexit(save_after);
    }
    engine.options = parse_options(argc, argv);
    const int status = run_mode(&engine);
    if (!quiet) fprintf(stderr, "%zu rows\n", engine.n_rows);
    if (!quiet && engine.form) fprintf(stderr, "%zu passes\n", passes_ran);
    return status;
}

int main(int argc, char **argv) {
    start_platform(&argc, &argv);
    const char *slash = strrchr(argv[0], '/'), *mode = slash ? slash + 1 : argv[0];
    if (strcmp(mode, "render") && argc > 1) mode = *++argv, argc--;
    else if (argc == 1) return unit_tests();
    if (!strcmp(mode, "list") && argc > 2) return run_small_pool(argc - 1, argv + 1);
    bool rendering = !strcmp(mode, "render") && argc == 3 && strlen(argv[2]) == 1 && strchr("01", *argv[2]);
    const bool scoring = !strcmp(mode, "logits");
    if (!rendering && ((strcmp(mode, "tokens") && !scoring) || argc != 2))
        die_usage("usage: tests/test, tests/test tokens MODEL, logits MODEL or render MODEL 0|1");
    static Engine engine;
    engine.options = (Options){.model = argv[1], .mode = scoring ? PERPLEXITY : TOKENIZE, .context = -1, .batch = 128,
                            .think = rendering && *argv[2] == '1'};
    quiet = rendering;
    load_model(&engine);
    engine.model.state.delta = alloc(state_size(&engine.model.config), sizeof(float), "a test");
    if (scoring) prepare_places(&engine);
    if (scoring) return print_logits(engine.pass);
    return rendering ? print_prompt(&engine) : print_tokens(&engine.tokenizer);
}
