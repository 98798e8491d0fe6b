// What needs qwen3.c's own functions. The name `render` means the mode of that name.
//
// tests/test                               checks them, most against naive versions in double: prints
//                                          each failure with its line, exits with 1 if there is any
// tests/test tokens MODEL < records        a line of ids for each text: marked (added tokens count, as
//                                          in the raw modes) or plain (they are text, as in chat)
// tests/test render MODEL 0|1 < records    the ids of a conversation's prompt, thinking off or on:
//                                          system, user and assistant (in which added tokens count)
//
// tests/test list BLOCKS MODEL ...         runs qwen3 MODEL ... with at most so many blocks in its cache, if
//                                          that is enough for a text
//
// A record is "KIND BYTES\n", that many bytes, and a newline that may be missing.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#ifndef _WIN32
#include <sys/wait.h>
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
    size_t n = (size_t)rows * cols;
    int8_t *q = alloc(n, 1, "a test");
    float *scale = random_floats(n / group);
    for (size_t i = 0; i < n; i++) q[i] = (int8_t)(below(256) - 128);  // -128 too, which export.py never writes
    return (Matrix){.rows = rows, .cols = cols, .group = group, .bits = 8, .bytes = q, .scales = scale};
}

// With four bits; `same` becomes the matrix of int8 and floats that stands for the same weights.
static Matrix random_matrix_4(int rows, int cols, int group, Matrix *same) {
    static const int8_t levels[16] = {-128, -100, -78, -61, -46, -33, -21, -9,
                                      2, 13, 24, 36, 49, 64, 82, 127};
    const size_t n_groups = (size_t)rows * cols / group;
    uint8_t *nibbles = alloc((size_t)rows * cols / 2, 1, "a test");
    uint16_t *half_scale = alloc(n_groups, sizeof(uint16_t), "a test");
    int8_t *q = alloc((size_t)rows * cols, 1, "a test");
    float *scale = random_floats(n_groups);
    for (size_t g = 0; g < n_groups; g++) {
        half_scale[g] = (uint16_t)below(0x7C00);  // every finite float of 16 bits that is not negative
        scale[g] = ldexpf(half_scale[g] % 1024 + (half_scale[g] < 1024 ? 0 : 1024),
                          max_int(half_scale[g] / 1024, 1) - 25);
        for (int i = 0; i < group / 2; i++) {
            const int low = below(16), high = below(16);
            nibbles[g * (group / 2) + i] = (uint8_t)(high << 4 | low);
            q[g * group + i] = levels[low];
            q[g * group + group / 2 + i] = levels[high];
        }
    }
    *same = (Matrix){.rows = rows, .cols = cols, .group = group, .bits = 8, .bytes = q, .scales = scale};
    return (Matrix){.rows = rows, .cols = cols, .group = group, .bits = 4, .bytes = (int8_t *)nibbles,
                    .scales = half_scale, .levels = levels};
}

typedef enum { QWEN3, QWEN2, EXPERTS } Kind;

// A random model has POSITIONS positions, two whole spans and a part of a third. WIDEST is the largest
// head_dim with which attention is tested.
enum { POSITIONS = 2 * SPAN + 90, WIDEST = 132 };

// A model in memory: two query heads per kv head; no rows of whole tiles.
// EXPERTS: 3 of 7, of which two are always equally likely
static Model random_model(int group, int head_dim, int batch, Kind kind) {
    Model m = {.config = {.dim = 2 * group, .hidden_dim = 3 * group, .n_layers = 2, .n_heads = 4,
                          .n_kv_heads = 2, .vocab_size = 77, .max_seq_len = POSITIONS, .head_dim = head_dim,
                          .group_size = group, .rope_theta = 1e4f, .rms_norm_eps = 1e-6f}};
    Config *g = &m.config;
    g->q_dim = g->n_heads * head_dim;
    g->kv_dim = g->n_kv_heads * head_dim;
    if (kind == EXPERTS) g->n_experts = 7, g->n_experts_used = 3;
    m.weights.embedding = random_matrix(g->vocab_size, g->dim, group);
    m.weights.classifier = random_matrix(g->vocab_size, g->dim, group);
    m.weights.rms_final = random_floats(g->dim);
    m.weights.layers = alloc(g->n_layers, sizeof(Layer), "a test");
    for (int i = 0; i < g->n_layers; i++) {
        Layer *l = &m.weights.layers[i];
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
        const int experts = max_int(g->n_experts, 1);
        l->w1 = random_matrix(experts * g->hidden_dim, g->dim, group);
        l->w3 = random_matrix(experts * g->hidden_dim, g->dim, group);
        l->w2 = random_matrix(experts * g->dim, g->hidden_dim, group);
        if (kind == EXPERTS) {
            float *router = random_floats((size_t)g->n_experts * g->dim);
            memcpy(router + 2 * g->dim, router + 5 * g->dim, g->dim * sizeof(float));
            l->router = router;
        }
    }
    state_init(&m, g->max_seq_len, batch, batch, 1);
    return m;
}

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

// The instruction set's primitives are equal to the portable ones, bit for bit where they are exact.
static void test_primitives(void) {
    for (int trial = 0; trial < 2000; trial++) {
        int8_t w[4 * LANES], x[4 * LANES];
        for (int i = 0; i < 4 * LANES; i++) {
            w[i] = (int8_t)(trial % 3 ? below(256) - 128 : -128 + 255 * below(2));
            x[i] = (int8_t)(trial % 3 ? below(255) - 127 : -127 + 254 * below(2));
        }
        VecI xv = load_vector(x), wv = load_vector(w), acc, rows[LANES];
        acc = wv >> 8;  // no overflow
        VecI a = dot4(acc, wv ^ splat(FLIP), xv), b = dot4_plain(acc, wv ^ splat(FLIP), xv);
        CHECK(memcmp(&a, &b, sizeof(a)) == 0);
        for (int i = 0; i < LANES; i++) {
            CHECK(zip_low(wv, xv)[i] == (i % 2 ? xv : wv)[i / 2]);
            CHECK(zip_high(wv, xv)[i] == (i % 2 ? xv : wv)[LANES / 2 + i / 2]);
        }
        a = pick_levels(level_table(x), wv), b = pick_levels_plain(level_table(x), wv);
        CHECK(memcmp(&a, &b, sizeof(a)) == 0);
        a = add_pairs(wv >> 1, xv >> 1), b = add_pairs_plain(wv >> 1, xv >> 1);
        CHECK(memcmp(&a, &b, sizeof(a)) == 0);
        for (int n = 1; n <= LANES; n *= 2) {
            for (int i = 0; i < n; i++) rows[i] = wv >> (8 + i);
            VecI sums = n == LANES ? sum_each(rows, LANES) : n == LANES / 2 ? sum_each(rows, LANES / 2)
                : n == LANES / 4 ? sum_each(rows, LANES / 4) : sum_each(rows, 1);
            for (int i = 0; i < LANES && (n >= LANES / 4 || n == 1); i++) {
                int32_t sum = 0;
                for (int j = i * n; j < (i + 1) * n; j++) sum += wv[j % LANES] >> (8 + j / LANES);
                CHECK(sums[i] == sum);
            }
        }
    }
    VecF a = splat_f(1.5f), b = splat_f(-0.25f), c = splat_f(3);
    for (int i = 0; i < LANES; i++) CHECK(mul_add_v(a, b, c)[i] == mul_add_plain(a, b, c)[i]);
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
        Quantized x = quantized_init(2, cols, group), row = quantized_row(&x, 1);
        float *in = random_floats(cols);
        memset(in + group, 0, group * sizeof(float));        // zeros: scale 0
        for (int i = 0; i < group; i++) in[2 * group + i] *= 1e-42f;  // too small for a scale
        quantize(&x, 0, 0, in, cols, group);
        float max = 0;
        int sum = 0;
        for (int i = 0; i < group; i++) max = fmaxf(max, fabsf(in[i]));
        for (int i = 0; i < group; i++) sum += x.q8[i];
        CHECK(x.bias_fix[0] == -128 * sum && x.bias_fix[1] == 0 && x.bias_fix[2] == 0);
        CHECK(x.scale[0] == max / 127 && x.scale[1] == 0 && x.scale[2] == 0);
        for (int i = 0; i < group; i++) {
            CHECK(fabs(x.q8[i] * (double)x.scale[0] - in[i]) <= x.scale[0] * 0.5001);
            CHECK(x.q8[group + i] == 0 && x.q8[2 * group + i] == 0);
        }
        quantize(&x, 1, 2 * group, in, group, group);  // the first group as row 1's last
        CHECK(memcmp(row.q8 + 2 * group, x.q8, group) == 0 && row.q8[group] == 0);
        CHECK(row.scale[2] == x.scale[0] && row.bias_fix[2] == x.bias_fix[0] && row.scale[1] == 0);
        in[2 * group + 5] = group % 64 ? INFINITY : -INFINITY;
        quantize(&x, 0, 2 * group, in + 2 * group, group, group);
        CHECK(isinf(x.scale[2]) && x.bias_fix[2] == 0);
        for (int i = 0; i < group; i++) CHECK(x.q8[2 * group + i] == 0);
        in[2 * group + 9] = NAN;
        quantize(&x, 0, 2 * group, in + 2 * group, group, group);
        CHECK(isnan(x.scale[2]));
    }
}

// Every kernel against the definition bit for bit, and that against doubles; rows and tokens that
// fill no tile, and a sum that is added. w's weights are `same`'s.
static void test_products(Matrix w, Matrix same) {
    const int rows = w.rows, cols = w.cols, group = w.group, n = 2 * TILE_TOKENS + 2;
    float *in = random_floats((size_t)n * cols);
    float *one = random_floats(n * rows), *all = random_floats(n * rows);
    Workspace own = {.panel = alloc(panel_bytes(cols, group), 1, "")};
    Quantized x = quantized_init(n, cols, group);
    memset(own.panel, 0xFF, panel_bytes(cols, group));  // NaN
    for (int t = 0; t < n; t++) quantize(&x, t, 0, in + t * cols, cols, group);
    for (int i = 0; i < TILE_TOKENS * (cols / group); i++) {  // past the last token
        quantized_row(&x, n + i / (cols / group)).scale[i % (cols / group)] = NAN;
    }
    for (int t = 0, few = 1; t < n; t += few++) {  // 1, 2, 3, ... tokens
        const Quantized from = quantized_row(&x, t);
        matmul_rows(&(Matmul){.w = &w, .x = &from, .out = one + t * rows, .stride = rows, .row_end = rows,
                              .n = min_int(few, n - t), .own = &own});
    }
    memset(all, 0, n * rows * sizeof(float));
    for (int row = 0; row < rows; row += PANEL_ROWS + 1) {  // parts that fill no block, either
        int end = min_int(row + PANEL_ROWS + 1, rows);
        const Quantized from = quantized_row(&x, 1);
        Matmul part = {.w = &w, .x = &from, .out = all + rows + row, .stride = rows, .row_begin = row,
                       .row_end = end, .n = n - 1, .own = &own};
        matmul_rows(&part);
        part.n = 1;  // the first of these tokens twice
        part.add = true;
        matmul_rows(&part);
    }
    for (int t = 0; t < n; t++) {
        const Quantized token = quantized_row(&x, t);
        for (int r = 0; r < rows; r++) {
            double sum = 0, size = 0;
            for (int i = 0; i < cols; i++) {
                double a = weight_q(&same, r, i, group) * (double)weight_scale(&same, r, i / group, group);
                double b = token.q8[i] * (double)token.scale[i / group];
                sum += a * b;
                size += fabs(a * b);
            }
            float value = dot_row(&w, r, &x, t, group);
            CHECK(fabs(value - sum) < 1e-6 * size, "group %d", group);
            CHECK(value == dot_row(&same, r, &x, t, group), "group %d", group);
            CHECK(one[t * rows + r] == value, "group %d, row %d", group, r);
            float expected = t == 0 ? 0 : t == 1 ? 2 * value : value;
            CHECK(all[t * rows + r] == expected, "group %d, row %d", group, r);
        }
    }
}

static void test_matmul(void) {
    static const int rests[] = {3, LANES / 2};  // groups after the last whole vector
    const int rows = 4 * LANES + PANEL_ROWS - 3;
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

// Fewer rows than a vector has lanes: nothing before the matrix is read, where a page is missing.
static void test_few_rows(void) {
#ifndef _WIN32
    const size_t page = sysconf(_SC_PAGESIZE);
    for (int rows = 1; rows < LANES; rows += LANES - 2) {
        Matrix w = random_matrix(rows, 32, 32);
        char *p = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memcpy(p + page, w.bytes, rows * 32);
        w.bytes = (int8_t *)p + page;
        CHECK(mprotect(p, page, PROT_NONE) == 0);
        test_products(w, w);
        munmap(p, 2 * page);
    }
#endif
}

// A text of its own for each model: blocks in reverse order, so that nobody reads them as they lie
static Text *scattered(const State *s) {
    Text *text = alloc(1, sizeof(Text), "a test");
    *text = whole_cache(s);
    for (int i = 0; i < s->blocks; i++) text->blocks[i] = s->blocks - 1 - i;
    return text;
}

// Store a key or a value (head_dim) of row t in layer p->l.
static void put_key(const Pass *p, int t, int kv_head, const float *k) {
    const Row *row = &p->s->rows[t];
    for (int j = 0; j < p->c->head_dim; j++) *key_at(p, row->text, kv_head, row->pos, j) = k[j];
}

static void put_value(const Pass *p, int t, int kv_head, const float *v) {
    const Row *row = &p->s->rows[t];
    for (int j = 0; j < p->c->head_dim; j++) *value_at(p, row->text, kv_head, row->pos, j) = v[j];
}

// Random keys and values (head_dim) of layer p->l at the first n positions
static void fill_cache(const Pass *p, const Text *text, int n) {
    const Config *c = p->c;
    Row *row = p->s->rows;
    for (int pos = 0; pos < n; pos++) {
        *row = (Row){.pos = pos, .text = text};
        for (int h = 0; h < c->n_kv_heads; h++) {
            float *x = random_floats(2 * c->head_dim);
            put_key(p, 0, h, x);
            put_value(p, 0, h, x + c->head_dim);
            for (int j = 0; j < c->head_dim; j++) {
                CHECK(*key_at(p, text, h, pos, j) == x[j]);
                CHECK(*value_at(p, text, h, pos, j) == x[c->head_dim + j]);
            }
        }
    }
}

// attend(), span by span, as the kernel does it: a (head_dim) for one query head of token t
static void attend_by_spans(const Pass *p, int t, int head, float *a) {
    const Config *c = p->c;
    const State *s = p->s;
    const int kv_head = head / (c->n_heads / c->n_kv_heads), len = s->rows[t].pos + 1;
    const float *q = s->q + t * c->q_dim + head * c->head_dim;
    const Text *text = s->rows[t].text;
    float score[SPAN], max_of_all = -INFINITY, total_of_all = 0;
    memset(a, 0, c->head_dim * sizeof(float));
    for (int start = 0, n; start < len; start += n) {
        n = min_int(SPAN, len - start);
        for (int i = 0; i < n; i++) {
            float dot = 0;
            for (int j = 0; j < c->head_dim; j++)
                dot = mul_add(*key_at(p, text, kv_head, start + i, j), q[j], dot);
            score[i] = dot * (1 / sqrtf((float)c->head_dim));
        }
        const float max = fmaxf(max_of(score, n), -FLT_MAX), total = softmax_terms(score, n, max);
        const float larger = fmaxf(max_of_all, max);
        const float keep = fast_exp(max_of_all - larger), take = fast_exp(max - larger);
        total_of_all = mul_add(total_of_all, keep, total * take);
        max_of_all = larger;
        for (int j = 0; j < c->head_dim; j++) {
            float sum = 0;
            for (int i = 0; i < n; i++)
                sum = mul_add(*value_at(p, text, kv_head, start + i, j), score[i], sum);
            a[j] = mul_add(a[j], keep, sum * take);
        }
    }
    for (int j = 0; j < c->head_dim; j++) a[j] *= 1 / total_of_all;
}

// attend_all() against attend_by_spans(), bit for bit, and against attend(): bit for bit up to SPAN
// positions, within 1e-5 beyond
static void check_attention(Pass *p) {
    const Config *c = p->c;
    const State *s = p->s;
    const int size = p->n * c->q_dim;
    float score[POSITIONS], spans[WIDEST], *all = random_floats(size);
    attend_all(p);
    memcpy(all, s->a, size * sizeof(float));
    for (int t = 0; t < p->n; t++) {
        for (int h = 0; h < c->n_heads; h++) {
            const int at = t * c->q_dim + h * c->head_dim;
            attend(p, t, h, score);
            attend_by_spans(p, t, h, spans);
            const size_t bytes_of_head = c->head_dim * sizeof(float);
            CHECK(!memcmp(all + at, spans, bytes_of_head), "token %d, head %d", t, h);
            if (s->rows[t].pos < SPAN) CHECK(!memcmp(all + at, s->a + at, bytes_of_head), "token %d", t);
            for (int j = at; j < at + c->head_dim; j++)
                CHECK(fabsf(s->a[j] - all[j]) <= 1e-5f, "token %d, head %d, column %d", t, h, j - at);
        }
    }
}

// Batches of 1 to 40 tokens, at the beginning, anywhere, at the end and across spans
static void test_attention(void) {
    static const int head_dims[] = {24, 64, 88, WIDEST};  // also an odd number of vectors
    for (int i = 0; i < 4; i++) {
        Model m = random_model(32, head_dims[i], 40, QWEN3);
        State *s = &m.state;
        Pass p = {.c = &m.config, .s = &m.state, .l = 1};
        const Text *text = scattered(s);
        fill_cache(&p, text, POSITIONS);
        for (int round = 0; round < 10; round++) {
            p.n = round == 8 ? 2 : 1 + round % 4 * 13;
            int start = below(round < 4 ? 101 - p.n : POSITIONS + 1 - p.n);
            if (round == 4 || (round >= 6 && round <= 8)) start = 2 * SPAN + 1;
            if (round == 5) start = SPAN - 6;  // across spans
            for (int t = 0; t < p.n; t++) s->rows[t] = (Row){.pos = start + t, .text = text};
            s->q = random_floats(p.n * m.config.q_dim);
            for (int j = 0; j < p.n * m.config.q_dim; j++) s->q[j] *= 5;
            check_attention(&p);
        }
    }
}

// Scores of -infinity count as 0, even if they are all those of a span; one NaN makes a row NaN.
static void test_attention_not_finite(void) {
    for (int round = 0; round < 2; round++) {
        Model m = random_model(64, 32, 40, QWEN3);
        State *s = &m.state;
        Pass p = {.c = &m.config, .s = &m.state, .n = 1};
        float huge[32], nan[32];
        const Text *text = scattered(s);
        fill_cache(&p, text, POSITIONS);
        for (int j = 0; j < 32; j++) huge[j] = -3e38f, nan[j] = NAN;
        for (int i = 0; i < SPAN; i++) s->rows[0].pos = i + round * SPAN, put_key(&p, 0, 0, huge);
        s->rows[0].pos = round * SPAN + 10;
        put_key(&p, 0, 1, nan);
        s->rows[0].pos = POSITIONS - 1;
        for (int i = 0; i < m.config.q_dim; i++) s->q[i] = 5;
        attend_all(&p);
        for (int h = 0; h < 4; h++) {
            float score[POSITIONS], found = s->a[h * 32];
            attend(&p, 0, h, score);
            CHECK(h < 2 ? fabsf(found - s->a[h * 32]) <= 1e-5f : isnan(found), "head %d: %g", h, found);
        }
    }
}

// With a query that is 400 times the key of position i, the answer is the value of position i.
static void test_attention_one_hot(void) {
    Model m = random_model(64, 32, 40, QWEN3);
    State *s = &m.state;
    const Config *c = &m.config;
    Pass p = {.c = c, .s = s, .l = 1, .n = 3};
    const Text *text = scattered(s);
    fill_cache(&p, text, 40);
    int wanted[3 * 4];  // by tokens and heads
    for (int i = 0; i < 3 * c->n_heads; i++) {
        s->rows[i / c->n_heads] = (Row){.pos = 37 + i / c->n_heads, .text = text};
        wanted[i] = below(38 + i / c->n_heads);
        for (int j = 0; j < c->head_dim; j++)
            s->q[i * c->head_dim + j] = 400 * *key_at(&p, text, i % c->n_heads / 2, wanted[i], j);
    }
    attend_all(&p);
    for (int i = 0; i < 3 * c->n_heads; i++) {
        for (int j = 0; j < c->head_dim; j++) {
            float expected = *value_at(&p, text, i % c->n_heads / 2, wanted[i], j);
            CHECK(fabsf(s->a[i * c->head_dim + j] - expected) < 0.01f, "row %d, column %d", i, j);
        }
    }
}

// Logits of every position do not depend on how the tokens are cut into batches, nor on threads.
static void test_batches(void) {
    int tokens[60];
    for (int i = 0; i < 60; i++) tokens[i] = below(77);
    for (int head_dim = 32; head_dim <= 96; head_dim += 16) {  // 48, 80: no whole vectors
        const Kind kind = head_dim == 64 ? QWEN2 : head_dim == 80 ? EXPERTS : QWEN3;
        uint64_t same = rng;
        float *expected = NULL;
        for (int batch = 1; batch <= 60; batch += batch < 3 ? 1 : 19) {
            rng = same;
            Model m = random_model(64, head_dim, 60, kind);
            float *logits = random_floats(60 * 77);
            const Text *text = scattered(&m.state);
            for (int pos = 0; pos < 60; pos += batch) {
                int n = min_int(batch, 60 - pos);
                CHECK(forward_text(&m, text, tokens + pos, n, pos, n));
                memcpy(logits + pos * 77, classify(&m, 0, n), n * 77 * sizeof(float));
            }
            if (expected) CHECK(!memcmp(logits, expected, 60 * 77 * sizeof(float)), "batch %d", batch);
            expected = logits;
        }
        for (int i = 0; i < 60 * 77; i++) CHECK(isfinite(expected[i]));
    }
}

// A mixture of experts, bit for bit as the definition of the product gives it, token by token; the
// choice by sorting, the first of equal ones first
static void test_experts(void) {
    for (int no_topk_norm = 0; no_topk_norm < 2; no_topk_norm++) {
        Model m = random_model(32, 32, 20, EXPERTS);
        Config *c = &m.config;
        State *s = &m.state;
        const Layer *w = &m.weights.layers[1];
        Pass p = {.c = c, .s = s, .l = 1, .w = w, .n = 20};
        c->no_topk_norm = no_topk_norm;
        float *x = random_floats(p.n * c->dim), *h = random_floats(c->dim), *up = random_floats(c->hidden_dim);
        float *gate = random_floats(c->hidden_dim), *sum = random_floats(c->dim);
        Quantized hq = quantized_init(1, c->hidden_dim, 32);
        memcpy(s->x, x, p.n * c->dim * sizeof(float));
        norm(&p, w->rms_ffn);
        experts(&p);
        for (int t = 0; t < p.n; t++) {
            double likely[7], total = 0, chosen = 0;
            int order[7], n_before = 0;
            rmsnorm(h, x + t * c->dim, w->rms_ffn, c->dim, c->rms_norm_eps);
            for (int e = 0; e < 7; e++) {
                likely[e] = 0;
                for (int i = 0; i < c->dim; i++) likely[e] += (double)h[i] * w->router[e * c->dim + i];
                total += likely[e] = exp(likely[e]);
                int at = e;  // insertion sort, stable
                for (; at > 0 && likely[order[at - 1]] < likely[e] * (1 - 1e-6); at--) order[at] = order[at - 1];
                order[at] = e;
            }
            for (int i = 0; i < 3; i++) chosen += likely[order[i]];
            memset(sum, 0, c->dim * sizeof(float));
            for (int e = 0; e < 7; e++) {
                const float share = s->routing->share[t * 7 + e];
                const bool yes = e == order[0] || e == order[1] || e == order[2];
                const double expected = !yes ? 0 : likely[e] / (no_topk_norm ? total : chosen);
                CHECK(fabs(share - expected) < 1e-4 * expected + 1e-30, "token %d, expert %d", t, e);
                n_before += share > 0;
                if (share == 0) continue;
                for (int i = 0; i < c->hidden_dim; i++) {
                    gate[i] = dot_row(&w->w1, e * c->hidden_dim + i, &s->xq, t, 32);
                    up[i] = dot_row(&w->w3, e * c->hidden_dim + i, &s->xq, t, 32);
                }
                silu_times(gate, up, c->hidden_dim);
                quantize(&hq, 0, 0, gate, c->hidden_dim, 32);
                for (int i = 0; i < c->dim; i++) sum[i] += share * dot_row(&w->w2, e * c->dim + i, &hq, 0, 32);
            }
            CHECK(n_before == 3);
            for (int i = 0; i < c->dim; i++) {
                CHECK(s->x[t * c->dim + i] == x[t * c->dim + i] + sum[i], "token %d, element %d", t, i);
            }
        }
    }
}

// A NaN of either sign, an infinity: the token has no experts, and its x says so.
static void test_experts_not_finite(void) {
    const float bad[] = {NAN, -NAN, INFINITY};
    for (int i = 0; i < 3 * 7; i++) {
        float *share = random_floats(7);
        const Config c = {.n_experts = 7, .n_experts_used = 3};
        share[i % 7] = bad[i / 7];
        CHECK(!choose_experts(&c, share), "%d", i);
        for (int e = 0; e < 7; e++) CHECK(share[e] == 0);
    }
    Model m = random_model(32, 32, 20, EXPERTS);
    Pass p = {.c = &m.config, .s = &m.state, .w = &m.weights.layers[0], .n = 20};
    memcpy(m.state.x, random_floats(20 * m.config.dim), 20 * m.config.dim * sizeof(float));
    m.state.x[5 * m.config.dim + 3] = -INFINITY;
    norm(&p, p.w->rms_ffn);
    experts(&p);
    for (int t = 0; t < 20; t++) CHECK(isfinite(m.state.x[t * m.config.dim]) == (t != 5), "token %d", t);
    CHECK(m.state.routing->place[m.state.routing->n_active] == 19 * 3);
}

static void count_job(void *arg, int begin, int end) {
    for (int i = begin; i < end; i++) atomic_fetch_add((_Atomic int *)arg + i, i + 1);
}

static void test_parallel(void) {
    static _Atomic int counts[1000];
    for (int trial = 0; trial < 3000; trial++) {
        int n = 1 + below(1000), chunk = 1 + below(50);
        memset((void *)counts, 0, sizeof(counts));
        if (trial % 100 == 0) usleep(2000);  // the workers fall asleep
        parallel(count_job, (void *)counts, n, chunk);
        for (int i = 0; i < n; i++) CHECK(counts[i] == i + 1, "item %d of %d", i, n);
    }
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
}

// Of the file where rope is scaled, else theta's
static void test_frequencies(void) {
    const float freq[] = {0.25f, 0, 1e-9f, 3};
    Config g = {.head_dim = 8, .rope_theta = 1e4f};
    for (int j = 0; j < 4; j++) {
        CHECK(fabs(rope_frequency(&g, j) / pow(1e4, -2.0 * j / 8) - 1) < 1e-6, "j %d", j);
    }
    g.rope_scaling = 2, g.rope_freq = freq;
    for (int j = 0; j < 4; j++) CHECK(rope_frequency(&g, j) == freq[j], "j %d", j);
    Model m = random_model(32, 32, 1, false);
    embed(&m, 0);
    CHECK(m.state.cos[0] == 1);
    m.config.rope_scaling = 2, m.config.rope_factor = 1.25f, m.config.rope_freq = random_floats(64);
    embed(&m, 0);
    CHECK(m.state.cos[0] == 1.25f && m.state.sin[0] == 0);
}

static Sampler random_sampler(float temperature, float top_p, int top_k) {
    return (Sampler){.temperature = temperature, .top_p = top_p, .top_k = top_k, .rng = 7,
                     .repetition = 1, .answered = alloc(1000, 1, ""), .seen = alloc(1000, 1, "")};
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
    Sampler greedy = random_sampler(0, 0.8f, 20);
    CHECK(sample(&greedy, (float[]){1, 3, 3, 2}, 4) == 1);
    greedy.presence = 1.5f;
    greedy.answered[1] = greedy.answered[2] = true;
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
        double found = surprise(logits, N, id);
        CHECK(fabs(found - log(sum)) < 1e-6 * (1 + log(sum)), "%.9g, not %.9g", found, log(sum));
    }
}

// HF's repetition penalty comes first: 3 / 1.2 - 0.25, -3 * 1.2 - 0.25; 0 stays.
static void test_penalties(void) {
    Sampler s = random_sampler(0, 1, 0);
    float logits[] = {3, 3, -3, -3, 0, 3};
    s.repetition = 1.2f;
    s.presence = 0.25f;
    s.seen[0] = s.seen[2] = s.seen[4] = s.seen[5] = s.answered[2] = s.answered[5] = true;
    penalize(&s, logits, 6);
    const float expected[] = {3 / 1.2f, 3, -3 * 1.2f - 0.25f, -3, 0, 3 / 1.2f - 0.25f};
    for (int i = 0; i < 6; i++) CHECK(logits[i] == expected[i], "%d: %g", i, logits[i]);
}

// Naively: the ids that followed the last NGRAM ids at the latest earlier place, repeated if they end
static void test_draft(void) {
    for (int trial = 0; trial < 3000; trial++) {
        int ids[80], n = NGRAM + below(60), most = below(2 * draft_rows()), from = n - 1;
        const bool by_cache = below(2);         // what limits the draft
        Engine e = {.answer.text.ids = {ids, n - 1, 80}, .draft = {1, 1, 0}};
        e.model.state.logit_rows = by_cache ? 80 : most + 1;
        e.model.state.seq_len = by_cache ? n + most : 100;
        for (int i = 0; i < n; i++) ids[i] = below(2);
        for (int i = n; i < 80; i++) ids[i] = -1;
        for (int same = 0; from >= NGRAM; from--) {
            for (same = 0; same < NGRAM && ids[from - 1 - same] == ids[n - 1 - same];) same++;
            if (same == NGRAM) break;
        }
        draft(&e);
        const int drafted = e.draft.n;
        CHECK(drafted == (from >= NGRAM ? most : 0) && e.draft.row == 0);
        CHECK(e.draft.credit == 1 - drafted * DRAFT_COST);
        for (int i = 0; i < drafted; i++) CHECK(ids[n + i] == ids[from + i % (n - from)]);
        for (int i = n + drafted; i < 80; i++) CHECK(ids[i] == -1);
    }
}

typedef struct {
    Ids ids[2], cached[2];  // of two turns
    Ending ending[2];
    size_t reused[2];
    uint64_t rng;
    int passes;
} Answers;

// Two turns, the second goes on from the first.
static Answers answer_twice(Engine *e, const Sampler *sampler, const Ids *prompt) {
    Answers a = {0};
    Ids ids = {0};
    e->answer.text.ids.n = 0;
    e->draft.credit = 0;  // one draft: what comes after it has to be earned
    e->answer.sampler = *sampler;
    for (int turn = 0; turn < 2; turn++) {
        Ids *answer = &a.ids[turn];
        for (size_t i = 0; i < prompt->n; i++) ids_add(&ids, prompt->p[i]);
        CHECK(prefill(e, &ids));
        a.reused[turn] = e->reused;
        a.passes -= e->model.state.passes;
        answer->p = grow(answer->p, &answer->cap, 0, 101, sizeof(int));
        int before = allocations;
        a.ending[turn] = generate(e, answer);
        a.passes += e->model.state.passes;
        CHECK(allocations == before, "%d while decoding", allocations - before);
        for (size_t i = 0; i < e->answer.text.ids.n; i++) ids_add(&a.cached[turn], e->answer.text.ids.p[i]);
        for (size_t i = 0; i < answer->n; i++) ids_add(&ids, answer->p[i]);
        if (ids.n + prompt->n > (size_t)e->model.state.seq_len) break;
    }
    a.rng = e->answer.sampler.rng;
    free(ids.p);
    return a;
}

// Drafts change the number of forward passes, and nothing else: the answers, how they end, what is
// left in the cache for the next turn, and the random numbers used are those of single steps.
static void test_drafts(void) {
    Writer writer = {0};
    writer.held.p = grow(NULL, &writer.held.cap, 0, 100, 1);
    Engine e[2] = {{.answer.writer = &writer}, {.answer.writer = &writer}};
    int passes[2] = {0}, endings[4] = {0};
    for (int k = 0; k < 2; k++) {
        rng = 77;
        e[k].model = random_model(32, 8, k ? 16 : 1, false);
        int vocab_size = e[k].model.config.vocab_size;
        e[k].answer.text = whole_cache(&e[k].model.state);
        e[k].tokenizer = (Tokenizer){.vocab_size = vocab_size, .think = -1, .end_think = -1,
                                     .text = alloc(vocab_size, sizeof(Bytes), "a test"),
                                     .kind = alloc(vocab_size, 1, "a test")};
    }
    e[1].model.state.logit_rows = min_int(16, 2 * draft_rows());
    Sampler sampler = random_sampler(0, 1, 0);
    sampler.answered = alloc(77, sizeof(bool), "a test");
    sampler.seen = alloc(77, sizeof(bool), "a test");
    for (int trial = 0; trial < 200; trial++) {
        int prompt_ids[20], stop = below(77);
        Ids prompt = {prompt_ids, 1 + below(20), 20};
        for (size_t i = 0; i < prompt.n; i++) prompt_ids[i] = below(77);
        sampler.temperature = trial % 4 ? 2.0f * (float)random_next(&rng) : 0;
        sampler.top_k = below(2) * 2;
        sampler.presence = below(4) ? 0 : 0.5f;
        sampler.repetition = below(4) ? 1 : 1.05f;
        sampler.rng = trial;
        int n = below(2) ? -1 : below(60), seq_len = below(2) ? 100 : 20 + below(80);
        Answers a[2];
        for (int k = 0; k < 2; k++) {
            e[k].max_new = n;
            e[k].model.state.seq_len = seq_len;
            e[k].tokenizer.stop = (Ids){&stop, trial % 3 == 0, 1};
            a[k] = answer_twice(&e[k], &sampler, &prompt);
            passes[k] += a[k].passes;
        }
        CHECK(a[0].rng == a[1].rng, "trial %d", trial);
        for (int turn = 0; turn < 2; turn++) {
            CHECK(a[0].ending[turn] == a[1].ending[turn], "trial %d, turn %d", trial, turn);
            CHECK(a[0].reused[turn] == a[1].reused[turn], "trial %d, turn %d", trial, turn);
            CHECK(same_ids(&a[0].ids[turn], &a[1].ids[turn]), "trial %d, turn %d", trial, turn);
            CHECK(same_ids(&a[0].cached[turn], &a[1].cached[turn]), "trial %d, turn %d", trial, turn);
            endings[a[0].ending[turn]]++;
            for (int k = 0; k < 2; k++) free(a[k].ids[turn].p), free(a[k].cached[turn].p);
        }
    }
    CHECK(endings[TURN_ENDED] && endings[LIMIT_REACHED] && endings[CONTEXT_ENDED]);
    if (TILE_TOKENS > 1) CHECK(passes[1] < passes[0] * 0.85, "%d passes, not %d", passes[1], passes[0]);
    else CHECK(passes[1] == passes[0]);
    e[1].draft.credit = 0;  // drafts that are always wrong: one in DRAFT_COST passes for each token
    e[1].max_new = -1;
    e[1].model.state.seq_len = 100;
    e[1].answer.text.ids.n = 50;
    memset(e[1].answer.text.ids.p, 0, 100 * sizeof(int));
    int drafts = 0;
    for (int pass = 1; pass <= 5000; pass++) {
        draft(&e[1]);
        const int drafted = e[1].draft.n;
        CHECK(drafted == 0 || drafted == draft_rows() - 1, "%d ids", drafted);
        CHECK(!drafted || (TILE_TOKENS > 1));
        drafts += drafted > 0;
    }
    const int passes_each = DRAFT_COST * (draft_rows() - 1);
    if (TILE_TOKENS > 1) CHECK(drafts == 1 + 5000 / passes_each, "%d drafts", drafts);
}

// A draft that overflows (its V is infinite) changes nothing: the token runs again without it.
static void test_draft_that_overflows(void) {
    enum { BAD = 70, N = 12 };
    float expected[77];
    for (int drafting = 0; drafting < 2; drafting++) {
        int context[N] = {1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4};
        Engine e = {.max_new = -1};
        Ids prompt = {context, N, N};
        rng = 5;
        Model *m = &e.model;
        *m = random_model(32, 8, 16, QWEN3);
        float *column = (float *)m->weights.embedding.scales, *wv = (float *)m->weights.layers[0].wv.scales;
        for (int id = 0; id < 77; id++) column[2 * id] = id == BAD ? 1 : 0;     // the first group of x
        for (int row = 0; row < m->config.kv_dim; row++) wv[2 * row] = 3e38f;   // which only V reads so
        m->state.logit_rows = min_int(16, 2 * draft_rows());
        e.answer.text = whole_cache(&m->state);
        CHECK(prefill(&e, &prompt));
        advance_start(&e);
        e.answer.text.ids.p[5] = BAD;  // what 1 2 3 4 5 was followed by
        e.draft.credit = drafting ? 10 * DRAFT_COST : -10 * DRAFT_COST;
        const float *logits = advance(&e, 5);
        CHECK(e.answer.text.ids.n == N + 1 && e.draft.n == 0 && isfinite(sum_double(logits, 77)));
        if (TILE_TOKENS > 1) CHECK(m->state.passes == 2 + drafting, "%d passes", m->state.passes);
        if (drafting) CHECK(!memcmp(expected, logits, sizeof(expected)));
        memcpy(expected, logits, sizeof(expected));
    }
}

// At far positions an angle is large; its cosine is that of the float product, as in transformers.
static void test_far_positions(void) {
    Model m = random_model(64, 64, 1, false);
    for (int pos = 1; pos < 1 << 20; pos = pos * 3 + 1) {
        m.state.rows[0] = (Row){.token = 1, .pos = pos};
        embed(&m, 0);
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
        {"\xC3", "\uFFFD"}, {"\xE2\x82(", "\uFFFD\uFFFD("}, {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"}};
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
    Tokenizer t = {.chars = alloc(N_CHARS, sizeof(uint16_t), "")};
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

// Random vocabularies over two or three letters, some with equal scores, on random texts and runs.
static void test_merging(void) {
    enum { MERGES = 40, LONGEST = 300 };
    uint8_t text[256 + MERGES][8], s[LONGEST];
    Ids ids = {0}, expected = {0};
    Encoder e = {.out = &ids};
    for (int trial = 0; trial < 300; trial++) {
        Tokenizer t = {.vocab_size = 256 + MERGES, .text = alloc(256 + MERGES, sizeof(Bytes), ""),
                       .score = alloc(256 + MERGES, 4, ""), .kind = alloc(256 + MERGES, 1, "")};
        int letters = 1 + trial % 3;
        for (int id = 0; id < t.vocab_size; id++) {
            t.text[id] = (Bytes){text[id], id < 256 ? 1 : 2 + below(trial % 2 ? 3 : 6)};
            t.score[id] = (float)-below(trial % 4 ? 100000 : 3);
            if (trial % 4 == 1) t.score[id] = 50000 + t.score[id];      // of either sign
            if (t.score[id] == 0 && below(2)) t.score[id] = -0.0f;      // equal to 0
            text[id][0] = (uint8_t)id;
            for (size_t i = 0; i < t.text[id].n && id >= 256; i++) text[id][i] = 'a' + below(letters);
            if (id >= 256 && trial % 5 == 0) t.score[id] = (float)(256 - id);
        }
        index_tokens(&t, "a test");
        e.tok = &t;
        for (int round = 0; round < 20; round++) {
            Bytes piece = {s, 1 + below(LONGEST)};
            for (size_t i = 0; i < piece.n; i++) s[i] = round % 4 ? 'a' + below(letters) : 'a';
            ids.n = expected.n = 0;
            merge_naively(&t, piece, &expected);
            encode_piece(&e, piece);
            CHECK(same_ids(&ids, &expected), "trial %d, round %d, %zu bytes", trial, round, piece.n);
        }
    }
}

// Added tokens of two letters, in any order, some of which begin others: the longest wins. Ctrl-C ends
// the search.
static void test_added(void) {
    enum { TOKENS = 12, LONGEST = 40 };
    for (int trial = 0; trial < 300; trial++) {
        uint8_t s[LONGEST], letters[256 + TOKENS][8], kind[256 + TOKENS] = {0};
        float score[256 + TOKENS] = {0};
        Bytes text[256 + TOKENS], rest = {s, below(LONGEST)};
        Tokenizer t = {.vocab_size = 256 + TOKENS, .text = text, .kind = kind, .score = score};
        for (size_t i = 0; i < LONGEST; i++) s[i] = (uint8_t)('a' + below(2));
        for (int id = 0; id < 256 + TOKENS; id++) {
            text[id] = (Bytes){letters[id], id < 256 ? 1 : 2 + below(6)};
            letters[id][0] = (uint8_t)id;
            for (size_t i = 0; i < text[id].n && id >= 256; i++) letters[id][i] = (uint8_t)('a' + below(2));
            bool is_new = id >= 256;
            for (int other = 256; other < id; other++) is_new &= !bytes_equal(text[id], text[other]);
            if (is_new) kind[id] = ADDED;
        }
        index_tokens(&t, "a test");
        size_t at = 0, from = 0;
        for (int found = 0; found >= 0; from = at += found >= 0 ? text[found].n : 0) {
            int expected = -1;
            size_t there = from;
            for (; there < rest.n; there++) {
                for (int id = 256; id < t.vocab_size; id++) {
                    Bytes a = text[id];
                    bool is_there = kind[id] && a.n <= rest.n - there && !memcmp(a.p, s + there, a.n);
                    if (is_there && (expected < 0 || a.n > text[expected].n)) expected = id;
                }
                if (expected >= 0) break;
            }
            found = added_next(&t, rest, &at);
            CHECK(found == expected && at == there, "trial %d: %d, not %d", trial, found, expected);
        }
        at = 0;
        interrupted = 1;
        CHECK(added_next(&t, rest, &at) == -1 && at == 0);
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
        CHECK((memory_size() == 12345678) == !strcmp(cases[i].group, "0::/\n"), "case %zu", i);
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
    static App app;
    Conversation *talk = &app.conversation;
    app.dialogue = quiet = true;
    app.engine.model.state.seq_len = 100;
    app.engine.answer.sampler.temperature = 1;
    conversation_add(talk, USER, bytes("question"));
    ids_add(&conversation_add(talk, ASSISTANT, bytes("answer"))->ids, 7);
    buffer_add(&app.input, bytes("/retry"));
    Bytes text[256];
    for (int i = 0; i < 256; i++) text[i] = bytes("t");
    app.engine.tokenizer.text = text;
    app.engine.tokenizer.kind = (uint8_t[256]){0};
    interrupted = 1;
    CHECK(run_message(&app));
    interrupted = quiet = 0;
    CHECK(talk->n == 2 && bytes_equal(bytes_of(&talk->p[1].text), bytes("answer")));
    CHECK(talk->p[1].ids.n == 1 && talk->p[1].ids.p[0] == 7);
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
        {"\"\\ud83d\\u0041\"", "\uFFFDA"}, {"\"\\ud83d\\ud83d\\ude42\"", "\uFFFD🙂"}, {"\"\x80\"", "\x80"},
        {"[]", NULL}, {"{}", NULL}, {" [1, -0, 0.5, 1e9, -12.25E-3, 2e+1]", NULL}, {"true", NULL}, {"null", NULL},
        {"{\"a\": {\"b\": [false, \"]\"]}, \"a\": []}", NULL}};
    const char *bad[] = {"", " ", "\"", "\"a", "\"\\", "\"\\u", "\"\\u12", "\"\\u12g4\"", "\"\\x\"", "\"\n\"", "a", "[", "[1",
                         "[1,]", "[,]", "[1 2]", "{", "{\"a\"", "{\"a\":", "{\"a\":1", "{\"a\":1,}", "{a:1}", "{1:1}", "01",
                         "1.", ".5", "+1", "1e", "1e+", "-", "--1", "truer", "tru", "nul", "\"a\" b", "[]]", "\"\\u 123\""};
    for (size_t i = 0; i < sizeof(good) / sizeof(*good); i++) {
        Buffer text = {0};
        Json j = {.rest = bytes(good[i].line), .text = &text};
        json_value(&j, 0);
        json_token(&j, "");
        CHECK(!j.expected && j.rest.n == 0, "%s", good[i].line);
        if (good[i].text) CHECK(bytes_equal(bytes_of(&text), bytes(good[i].text)), "%s", good[i].line);
        free(text.p);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        Buffer text = {0};
        Json j = {.rest = bytes(bad[i]), .text = &text};
        json_value(&j, 0);
        json_token(&j, "");
        CHECK(j.expected || j.rest.n, "%s", bad[i]);
        free(text.p);
    }
    for (int depth = 99; depth <= 101; depth++) {
        char line[203];
        memset(line, '[', depth);
        memset(line + depth, ']', depth);
        line[2 * depth] = 0;
        Json j = {.rest = bytes(line)};
        json_value(&j, 0);
        CHECK(!j.expected == (depth <= 100), "%d levels", depth);
    }
}

static void test_json_messages(void) {
    const struct { const char *line, *roles, *last; } cases[] = {  // NULL: an error
        {"[{\"role\":\"user\",\"content\":\"a\"}]", "u", "a"},
        {"[{\"content\":\"a\",\"x\":[{\"role\":1}],\"role\":\"user\"}]", "u", "a"},
        {"[{\"role\":\"system\",\"content\":\"s\"}, {\"role\":\"user\",\"content\":\"a\"} ]", "su", "a"},
        {"[{\"role\":1,\"role\":\"user\",\"content\":[],\"content\":\"a\",\"content\":\"b\"}]", "u", "b"},
        {"[{\"r\\u006fle\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"\"},{\"role\":\"user\",\"content\":\"c\"}]",
         "uau", "c"},
        {"[]", NULL, 0}, {"", NULL, 0}, {"[{}]", NULL, 0}, {"[{\"role\":\"user\"}]", NULL, 0},
        {"[{\"content\":\"a\"}]", NULL, 0}, {"[{\"role\":\"user\",\"content\":\"a\"}", NULL, 0},
        {"[{\"role\":\"user\",\"content\":\"a\"},]", NULL, 0}, {"[{\"role\":\"tool\",\"content\":\"a\"}]", NULL, 0},
        {"[{\"role\":\"user\",\"content\":\"a\",\"content\":null}]", NULL, 0},
        {"[{\"role\":\"user\",\"role\":2,\"content\":\"a\"}]", NULL, 0},
        {"[{\"role\":\"assistant\",\"content\":\"a\"}]", NULL, 0},
        {"[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"content\":\"a\"}]", NULL, 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        Conversation talk = {0};
        Buffer text = {0};
        Json j = {.rest = bytes(cases[i].line), .text = &text};
        json_line(&j, &talk);
        CHECK(!j.expected == !!cases[i].roles, "%s", cases[i].line);
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
    const Config c = {.n_layers = 2, .n_kv_heads = 1, .head_dim = 64};
    const double room = memory_size() / 4 / (block_at(&c, 1, 0) * sizeof(float));
    CHECK(pool_blocks(&c, 10 * LANES - 1, 3) == 30);
    CHECK(pool_blocks(&c, INT_MAX / 64 * 63, 32) == max_int((int)room, INT_MAX / 64 * 63 / LANES + 1));
    most_blocks = 25;
    CHECK(pool_blocks(&c, 10 * LANES, 3) == 25);
    CHECK(pool_blocks(&c, 30 * LANES, 3) == 30);
    most_blocks = INT_MAX;
}

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
            Tokenizer t = {.chars = alloc(N_CHARS, sizeof(uint16_t), "")};
            Ids ids = {.n = (size_t)INT_MAX - 5 + more};
            Encoder enc = {.tok = &t, .out = &ids};
            interrupted = 1;  // nothing is cut into pieces
            fclose(stderr);
            encode_plain(&enc, bytes("abcd"));
            encode_flush(&enc);
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == more, "%d", status);
    }
#endif
}

static int unit_tests(void) {
    test_double_interrupt();  // forks, so before there are threads
    test_too_many_tokens();   // too
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
    test_few_rows();
    test_attention();
    test_attention_not_finite();
    test_attention_one_hot();
    test_batches();
    test_experts();
    test_experts_not_finite();
    test_parallel();
    test_rope();
    test_frequencies();
    test_far_positions();
    test_sampler();
    test_large_vocabulary();
    test_surprise();
    test_penalties();
    test_draft();
    test_drafts();
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
    buffer_add_ids(&line, ids);
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
        else encode_plain(&encoder, s);
        encode_flush(&encoder);
        print_ids(&ids);
    }
    return EXIT_SUCCESS;
}

static int print_prompt(App *app) {
    const Tokenizer *t = &app->engine.tokenizer;
    prepare_answer(app, &app->engine.answer, &app->writer, NULL);
    Conversation c = {0};
    Buffer text = {0};
    Ids ids = {0};
    for (char kind[16]; next_record(kind, &text);) {
        Bytes s = {text.p, text.n};
        if (!strcmp(kind, "assistant")) {
            Message *m = conversation_add(&c, ASSISTANT, (Bytes){0});
            Encoder encoder = {.tok = t, .out = &m->ids};
            encode_marked(&encoder, s);
            encode_flush(&encoder);
        } else {
            bool user = !strcmp(kind, "user");
            if (!user && strcmp(kind, "system")) die("stdin: unknown kind \"%s\"", kind);
            conversation_add(&c, user ? USER : SYSTEM, s);
        }
    }
    render(t, &c, 0, switched_on(app), &ids);
    print_ids(&ids);
    return EXIT_SUCCESS;
}

static int run_small_pool(int argc, char **argv) {  // argv: BLOCKS, and qwen3's arguments
    static App app;
    most_blocks = atoi(argv[0]);
    app.options = parse_options(argc, argv);
    return run(&app);
}

int main(int argc, char **argv) {
    start_platform(&argc, &argv);
    const char *slash = strrchr(argv[0], '/'), *mode = slash ? slash + 1 : argv[0];
    if (strcmp(mode, "render") && argc > 1) mode = *++argv, argc--;
    else if (argc == 1) return unit_tests();
    if (!strcmp(mode, "list") && argc > 2) return run_small_pool(argc - 1, argv + 1);
    bool rendering = !strcmp(mode, "render") && argc == 3 && strlen(argv[2]) == 1 && strchr("01", *argv[2]);
    if (!rendering && (strcmp(mode, "tokens") || argc != 2))
        die_usage("usage: tests/test, tests/test tokens MODEL or tests/test render MODEL 0|1");
    static App app;
    app.options = (Options){.model = argv[1], .mode = TOKENIZE, .context = -1, .think = rendering && *argv[2] == '1'};
    quiet = rendering;
    load(&app);
    return rendering ? print_prompt(&app) : print_tokens(&app.engine.tokenizer);
}
