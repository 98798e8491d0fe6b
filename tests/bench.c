// How fast this build is on this machine, and how near to what the machine can do.
//   tests/bench MODEL.bin
//   tests/bench SHAPE [BITS [GROUP [LAYERS]]]     make bench MODEL=30b-a3b BITS=4 LAYERS=8
//   tests/bench curve SHAPE ...                   at many lengths; takes minutes
//   tests/bench texts SHAPE ...                   many texts together; takes minutes
//   tests/bench decode SHAPE ...                  only decoding, in seconds, to compare two builds
// A SHAPE is the name of a synthetic model in a temporary file: see `shapes`. GROUP 0 is export.py's,
// LAYERS 0 the model's.
// Prompts should be bound by arithmetic (dot4 in the products, fma in attention: their rates in
// registers), decoding by the memory (the rate at which
// it can be read). These are measured beside them: machines change their speed.
#include "../qwen3.c"
#include "naive.h"
#include <sys/resource.h>

typedef struct {
    double best, median;
    int runs;
} Rate;

static Model m;
static Bytes mapped;  // the file of the model
static Pass *pass, *passes[2];  // with a cache of 32 bits, or of 8: use_cache says which runs
static int *text;
static float *states[MOST_TEXTS];  // of many texts together; the first is also a single text's
static int ids[16384];
static double effort = 1;  // less for a model that shows nothing but that everything runs

// ---- The model

// The header's fields from dim to shared_classifier, experts, and those from attention_every on
static const struct Shape {
    const char *name;
    int32_t dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len, head_dim, shared;
    int32_t n_experts, n_experts_used;
    int32_t attention_every, delta_k_heads, delta_v_heads, rotary_dim, gated;
} shapes[] = {
    {"0.6b", 1024, 3072, 28, 16, 8, 151936, 40960, 128, 1, 0, 0, 0, 0, 0, 0, 0},
    {"4b", 2560, 9728, 36, 32, 8, 151936, 40960, 128, 1, 0, 0, 0, 0, 0, 0, 0},
    {"8b", 4096, 12288, 36, 32, 8, 151936, 40960, 128, 0, 0, 0, 0, 0, 0, 0, 0},
    {"30b-a3b", 2048, 768, 48, 32, 4, 151936, 40960, 128, 0, 128, 8, 0, 0, 0, 0, 0},
    {"0.8b", 1024, 3584, 24, 8, 2, 248320, 262144, 256, 1, 0, 0, 4, 16, 16, 64, 1},  // Qwen3.5
    {"small", 128, 192, 2, 4, 2, 1000, 4096, 32, 1, 0, 0, 0, 0, 0, 0, 0},        // only to see that everything runs
    {"small-moe", 128, 192, 2, 4, 2, 1000, 4096, 32, 1, 8, 2, 0, 0, 0, 0, 0},
    {"small-delta", 128, 192, 4, 4, 2, 1000, 4096, 32, 1, 0, 0, 2, 1, 2, 16, 1},
};

static void put(FILE *f, const void *p, size_t size) {
    if (fwrite(p, 1, size, f) != size) die("temporary file in TMPDIR or /tmp: %s", strerror(errno));
}

// `size` bytes that repeat those of the block of `period` bytes
static void put_again(FILE *f, const void *block, size_t period, int64_t size) {
    for (; size > 0; size -= period) put(f, block, size < (int64_t)period ? (size_t)size : period);
}

static void put_ones(FILE *f, int64_t count) {
    for (const float one = 1; count > 0; count--) put(f, &one, sizeof(one));
}

// Random values, all different: rows that repeat would send all tokens to the same few experts. So
// would small embeddings, for what the layers add is similar for all tokens.
static void put_matrix(FILE *f, int64_t rows, int64_t cols, int group, int bits, float row_length) {
    static uint64_t block[8192], rng;
    static float scales[7 * 512];
    static uint16_t halves[7 * 512];
    for (int i = 0; i < 7 * 512; i++) {
        scales[i] = row_length * (1 + i % 7 / 7.0f) / (110 * sqrtf(cols));
        halves[i] = (uint16_t)((load_i32(scales + i) >> 13) - (112 << 10));
    }
    rows = (rows + PANEL - 1) / PANEL * PANEL;
    for (int64_t left = rows * cols * bits / 8; left > 0; left -= sizeof(block)) {
        for (size_t i = 0; i < 8192; i++) {  // SplitMix64's first steps
            const uint64_t z = rng += 0x9E3779B97F4A7C15u;
            block[i] = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
            block[i] ^= block[i] >> 27;
        }
        put(f, block, left < (int64_t)sizeof(block) ? (size_t)left : sizeof(block));
    }
    const int64_t n_groups = rows * cols / group;
    if (bits == 8) put_again(f, scales, sizeof(scales), n_groups * sizeof(float));
    else put_again(f, halves, sizeof(halves), n_groups * sizeof(uint16_t));
}

// Random routers: with equal ones, all tokens would choose the same experts.
static void put_routers(FILE *f, int64_t count) {
    uint64_t rng = 1;
    for (; count > 0; count--) {
        float value = random_next(&rng) - 0.5f;
        put(f, &value, sizeof(value));
    }
}

// Small random weights of delta layers: what S keeps differs from head to head.
static void put_delta(FILE *f, int layers, int64_t floats) {
    uint64_t rng = 2;
    for (int64_t count = layers * floats; count > 0; count--) {
        const float value = 0.1f + 0.2f * random_next(&rng);
        put(f, &value, sizeof(value));
    }
}

// A new file, whose name is in path (4096). The caller removes it.
static FILE *temporary_file(char *path) {
    const char *folder = getenv("TMPDIR");
    snprintf(path, 4096, "%s/qwen3-bench-XXXXXX", folder ? folder : "/tmp");
    const int fd = mkstemp(path);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "wb");
    if (!f) die("%s: %s", path, strerror(errno));
    return f;
}

// Maps a model of this shape. Its file has no name.
static void map_synthetic(const struct Shape *s, int bits, int group, int layers) {
    // Their mean is 0: a direction that all rows share would grow from layer to layer.
    static const int8_t levels[] = {-127, -98, -75, -57, -42, -29, -18, -6,
                                    6, 18, 29, 42, 57, 75, 98, 127};
    const int dim = s->dim, q_dim = s->n_heads * s->head_dim, kv_dim = s->n_kv_heads * s->head_dim;
    const int experts = max_int(s->n_experts, 1), k_dim = s->delta_k_heads * DELTA_DIM;
    const int v_dim = s->delta_v_heads * DELTA_DIM;
    const int n_attention = s->attention_every ? layers / s->attention_every : layers;
    const int64_t floats = 4 * (2 * k_dim + v_dim) + DELTA_DIM + 2 * s->delta_v_heads * (1 + dim);  // of a delta layer
    char path[4096];
    FILE *f = temporary_file(path);
    const int fd = fileno(f);
    remove(path);  // nothing is left of it, whatever happens
    int32_t header[64] = {0x616A6331, 1};
    memcpy(header + 2, &s->dim, 9 * sizeof(int32_t));
    header[4] = layers;
    header[11] = group;
    memcpy(header + 0x5C / 4, &s->n_experts, 2 * sizeof(int32_t));
    header[0x80 / 4] = 1;
    memcpy(header + 0x84 / 4, &s->attention_every, 5 * sizeof(int32_t));
    if (bits == 4) header[0x68 / 4] = 4, memcpy(header + 0x70 / 4, levels, 16);
    put(f, header, sizeof(header));
    put_ones(f, (int64_t)layers * 2 * dim + dim + (int64_t)n_attention * 2 * s->head_dim);
    put_routers(f, (int64_t)layers * s->n_experts * dim);
    put_delta(f, layers - n_attention, floats);
    put_matrix(f, s->vocab_size, dim, group, 8, sqrtf(dim));
    const int sizes[8][4] = {{q_dim, dim, k_dim, dim}, {kv_dim, dim, k_dim, dim}, {kv_dim, dim, v_dim, dim},
                             {s->gated * q_dim, dim, v_dim, dim}, {dim, q_dim, dim, v_dim}, {experts * s->hidden_dim, dim},
                             {experts * dim, s->hidden_dim}, {experts * s->hidden_dim, dim}};
    for (int i = 0; i < 8; i++) {
        for (int l = 0; l < layers; l++) {  // rows and columns with attention; the next two if a delta layer has others
            const int *size = sizes[i] + (i < 5 && s->attention_every && (l + 1) % s->attention_every ? 2 : 0);
            put_matrix(f, size[0], size[1], group, bits, 1);
        }
    }
    if (!s->shared) put_matrix(f, s->vocab_size, dim, group, 8, 1);
    if (fflush(f) != 0 || fsync(fd) != 0) die("temporary file in TMPDIR or /tmp: %s", strerror(errno));
    const off_t size = ftello(f);
#ifdef POSIX_FADV_DONTNEED
    // Pages that were just written are small. From the disk they come in 2 MB: see file_map.
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
#endif
    snprintf(path, sizeof(path), "/dev/fd/%d", fd);
    mapped = model_map(&m, path, true);
    // Reads all of it, so that no row waits for the disk. The file begins a header before rms_att.
    const volatile char *file = (char *)m.weights.layers[0].rms_att - sizeof(header);
    for (off_t i = 0; i < size; i += 4096) (void)file[i];
    fclose(f);
}

// ---- What the machine can do

// Keeps the compiler from knowing the value of vector v, without an instruction.
#if defined(__x86_64__) || defined(__i386__)
#define OPAQUE(v) __asm__ volatile("" : "+x"(v))
#elif defined(__aarch64__)
#define OPAQUE(v) __asm__ volatile("" : "+w"(v))
#else
#define OPAQUE(v) __asm__ volatile("" : "+m"(v))
#endif

// Enough sums that none waits for its last product, few enough that all stay in registers
enum { SUMS = LANES == 8 ? 8 : 12, PEAK_ITEMS = 64, PEAK_LOOPS = 20000 };

enum { INT8, FP32 };

static void run_peak_items(int kind, int count) {
    const int64_t loops = (int64_t)count * PEAK_LOOPS;
    VecI total = {0};
    if (kind == INT8) {
        VecI sum[SUMS] = {0}, x = splat(0x01020304), w = splat(0x04030201);
        for (int64_t loop = 0; loop < loops; loop++) {
            UNROLL for (int i = 0; i < SUMS; i++) {
                OPAQUE(x);  // not w: products share what AVX2 computes from w alone
                sum[i] = dot4(sum[i], w, x);
            }
        }
        for (int i = 0; i < SUMS; i++) total ^= sum[i];
    } else {
        VecF sum[SUMS] = {0}, x = splat_f(0.5f), w = splat_f(0.25f);
        for (int64_t loop = 0; loop < loops; loop++) {
            UNROLL for (int i = 0; i < SUMS; i++) {
                OPAQUE(x);
                sum[i] = mul_add_v(x, w, sum[i]);
            }
        }
        for (int i = 0; i < SUMS; i++) total ^= (VecI)sum[i];
    }
    OPAQUE(total);
}

static void peak_job(void *kind) {
    SLICES (s, PEAK_ITEMS, 1) run_peak_items(*(int *)kind, s.end - s.begin);
}

// For a fifth of a second. Returns multiply-adds.
static double run_peak(int kind) {
    double work = 0, start = now();
    do {
        on_all_threads(peak_job, &kind);
        work += (double)PEAK_ITEMS * PEAK_LOOPS * SUMS * (kind == INT8 ? 4 : 1) * LANES;
    } while (now() - start < 0.2 * effort);
    return work;
}

enum { READ_BLOCK = 1 << 16 };

// Every vector of the block at p, as so many sequences side by side.
INLINE void read_block(const VecI *p, const int sequences, const int ahead) {
    const int n = READ_BLOCK / sizeof(VecI) / sequences;
    VecI sum[8] = {0}, total = {0};
    for (int i = 0; i < n; i += 8 / sequences) {
        UNROLL for (int j = 0; j < 8; j++) {
            const VecI *q = p + j % sequences * n + i + j / sequences;
            if (ahead) __builtin_prefetch((const char *)q + ahead);
            sum[j] ^= *q;
        }
    }
    for (int i = 0; i < 8; i++) total ^= sum[i];
    OPAQUE(total);
}

static const char *read_start;
static int read_blocks;

static void read_job(void *arg) {
    EACH (i, read_blocks, 4) {
        const VecI *p = (const VecI *)(read_start + (size_t)i * READ_BLOCK);
        switch (*(int *)arg) {
        case 0: read_block(p, 1, 0); break;
        case 1: read_block(p, 1, 4096); break;
        case 2: read_block(p, 2, 2048); break;
        case 3: read_block(p, 4, 0); break;
        }
    }
}

// Returns bytes.
static double run_read(int kernel) {
    on_all_threads(read_job, &kernel);
    return (double)read_blocks * READ_BLOCK;
}

// ---- What we do

static void use_cache(int bits) {
    m.config.cache_bits = bits;
    pass = passes[bits == 8];
}

// A prompt of n tokens, cut as the program cuts it, and the scores of the next token.
static double run_prompt(int n) {
    for (int at = 0; at < n; at += pass->batch) {
        int count = min_int(pass->batch, n - at);
        forward_text(pass, text, ids + at, count, at, at + count == n);
        if (at + count == n) classify(pass, 1);
    }
    return n;
}

static double run_decode(int pos) {
    static int turn;  // another token each time: it chooses other experts
    forward_text(pass, text, ids + turn++ % 4096, 1, pos, 1);
    classify(pass, 1);
    return 1;
}

// ---- Many texts together: a list of texts (-l), and what its passes take alone

// So many texts of `prompt` tokens each, whose answers have `answer` tokens
static struct { int texts, prompt, answer; } list;
static char list_path[4096];
static Tokenizer words;

// A token for each byte, which no merge joins; all others are words.
static void make_tokenizer(void) {
    const struct { uint32_t longest, bos, eos; } header = {4, 0, 0};
    const float score = -1;
    char path[4096];
    FILE *f = temporary_file(path);
    put(f, &header, sizeof(header));
    for (int id = 0; id < m.config.vocab_size; id++) {
        const uint32_t n = id < 256 ? 1 : 4;
        put(f, &score, sizeof(score));
        put(f, &n, sizeof(n));
        put(f, n == 1 ? (const char *)&id : "word", n);
    }
    if (fclose(f) != 0) die("%s: %s", path, strerror(errno));
    tokenizer_load(&words, path, m.config.vocab_size);
    words.stop.n = 0;  // each answer has its length
    remove(path);
}

static void write_list(int texts, int prompt, int answer) {
    FILE *f = temporary_file(list_path);
    for (int t = 0; t < texts; t++) {  // no one begins like the one before it
        for (int i = 0; i < prompt; i++) fputc('a' + (t * 7 + i * 3) % 26, f);
        fputc('\n', f);
    }
    if (fclose(f) != 0) die("%s: %s", list_path, strerror(errno));
    list.texts = texts, list.prompt = prompt, list.answer = answer;
}

// All of it, as the program does it: reads the list, samples with the defaults, writes to /dev/null.
static double run_texts(int unused) {
    static Engine engine, prepared;  // once, because states are large and are never given back
    (void)unused;
    const Options options = parse_options(9, (char *[]){"", "MODEL", "-l", list_path, "-m", "generate",
                                                        "-s", "1", "-qq"});
    if (prepared.pass != pass) {
        engine = (Engine){.options = options, .model = m, .pass = pass, .tokenizer = words, .mode = GENERATE,
                          .most_texts = MOST_TEXTS};
        prepare_places(&engine);
        prepared = engine;
    }
    engine = prepared;
    memset(engine.users, 0, pass->n_blocks * sizeof(*engine.users));
    engine.options = options;
    engine.options.n = list.answer;
    const int out = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY);
    if (out < 0 || null < 0 || dup2(null, STDOUT_FILENO) < 0) die("/dev/null: %s", strerror(errno));
    run_list(open_list(&engine));
    dup2(out, STDOUT_FILENO);
    close(out), close(null);
    return (double)list.texts * list.answer;
}

// The same without the list, sampling and writing: the prompts' rows, as many as fit into a pass, then
// a row of each text, with its logits.
static double run_passes(int unused) {
    static int blocks[MOST_TEXTS][4096];
    const int length = list.prompt + list.answer, each = (length + pass->block_len - 1) / pass->block_len;
    (void)unused;
    for (int t = 0; t < MOST_TEXTS; t++) {
        for (int i = 0; i < each; i++) blocks[t][i] = t * each + i;
    }
    for (int left = list.texts, n; left > 0; left -= n) {
        int rows = 0, needed = 0;
        n = min_int(left, MOST_TEXTS);
        for (int i = 0; i < n * list.prompt; i++) {
            const int t = i / list.prompt, pos = i % list.prompt;
            const bool last = pos + 1 == list.prompt;
            pass->rows[rows++] = (Row){.token = ids[i % 4096], .pos = pos, .blocks = blocks[t], .state = states[t],
                                      .needed = last};
            needed += last;
            if (rows < pass->batch && i + 1 < n * list.prompt) continue;
            forward_rows(pass, rows);
            if (needed) classify(pass, needed);
            rows = needed = 0;
        }
        for (int pos = list.prompt; pos + 1 < length; pos++) {
            for (int t = 0; t < n; t++) {
                const int id = ids[(pos + 97 * t) % 4096];
                pass->rows[t] = (Row){.token = id, .pos = pos, .blocks = blocks[t], .state = states[t],
                                      .needed = true};
            }
            forward_rows(pass, n);
            classify(pass, n);
        }
    }
    return (double)list.texts * list.answer;
}

// ---- What a file of -K saves: the first token of a prompt that begins like the one in FILE

enum { KEPT = 4000, QUESTION = 20 };  // tokens: of the text, and of what follows it

typedef struct { double first, read; size_t n, cached; } KeptRun;  // seconds; bytes of FILE; tokens

// Runs a prompt in new memory, up to its answer's first token: after what is in FILE, which it replaces.
static KeptRun run_kept(const char *path, char letter) {
    static char prompt[KEPT + QUESTION + 1];
    static Engine engine;
    KeptRun r = {0};
    for (int i = 0; i < KEPT; i++) prompt[i] = 'a' + i * i / 7 % 26;
    for (int i = 0; i < QUESTION; i++) prompt[KEPT + i] = letter + i % 3;
    const Options options = parse_options(9, (char *[]){"", "MODEL", "-m", "generate", "-n", "1", "-qq", "-K", (char *)path});
    engine = (Engine){.options = options, .model = m, .tokenizer = words, .mode = GENERATE, .most_texts = 1, .file = mapped,
                      .pass = pass_init(&m, options.batch, 1, 1)};
    engine.options.cache_bits = m.config.cache_bits;
    prepare_places(&engine);
    const int out = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY);
    if (out < 0 || null < 0 || dup2(null, STDOUT_FILENO) < 0) die("/dev/null: %s", strerror(errno));
    const double start = now();
    Filed back = {.e = &engine, .fd = open(path, O_RDONLY)};
    r.n = file_size(back.fd);
    const char *error = r.n ? read_filed(&back) : NULL;
    if (error) die("%s: %s", path, error);
    r.read = now() - start;
    chat_turn(&engine, bytes(prompt));
    r.first = now() - start;
    r.cached = engine.slots[0].cached;
    dup2(out, STDOUT_FILENO);
    close(out), close(null), close(back.fd);
    Filed made = {.e = &engine, .writes = true, .fd = open(path, O_RDWR | O_TRUNC)};
    if (!write_filed(&made, engine.kept)) die("%s: %s", path, strerror(errno));
    close(made.fd);
    return r;
}

// How long memcpy takes to bring n bytes to new memory
static double copy_seconds(size_t n) {
    char *from = alloc(n, 1, "a test"), *to = alloc(n, 1, "a test");
    memset(from, 1, n);
    const double start = now();
    memcpy(to, from, n);
    OPAQUE(to);
    return now() - start;
}

static void bench_kept(void) {
    char path[4096];
    const int context = m.context;
    if (KEPT + QUESTION + 8 > m.config.max_seq_len || fclose(temporary_file(path)) != 0) return;
    m.context = KEPT + QUESTION + 8;
    const KeptRun first = run_kept(path, 'a'), second = run_kept(path, 'd'), third = run_kept(path, 'g');
    const double copied = copy_seconds(third.n);
    printf("%7d  -K -C %-2d              %9.2f s to the first token after %d; again with another end %.3f, %.3f s "
           "(%zu, %zu cached): %.0f, %.0f times sooner\n", n_threads, m.config.cache_bits, first.first, KEPT + QUESTION,
           second.first, third.first, second.cached, third.cached, first.first / second.first, first.first / third.first);
    printf("%7d  -K -C %-2d reads        %9.2f GB/s (%.0f MB in %.3f s), %.2f of memcpy\n", n_threads, m.config.cache_bits,
           third.n / third.read / 1e9, third.n / 1e6, third.read, copied / third.read);
    fflush(stdout);
    remove(path);
    m.context = context;
}

// ---- Measuring and printing

enum { MOST_RUNS = 256 };

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Runs once to warm up, unless that is a matter of seconds, then for a while. Other programs disturb
// a long run more surely than a short one, so the machine's own rates are of runs like ours: a pass
// over the weights is about as long as a token, the peak's loop near to a prompt of 512.
static Rate measure(double (*run)(int), int arg, double seconds) {
    double rates[MOST_RUNS], start = now(), work = run(arg), first = now() - start;
    Rate r = {0};
    if (first > 2) rates[r.runs++] = work / first;
    for (start = now(); r.runs < MOST_RUNS && (r.runs < 3 || now() - start < seconds * effort);) {
        if (r.runs > 0 && now() - start + first > 12) break;
        double before = now();
        work = run(arg);
        rates[r.runs++] = work / (now() - before + 1e-9);
    }
    qsort(rates, r.runs, sizeof(double), compare_doubles);
    r.best = rates[r.runs - 1];
    r.median = (rates[r.runs / 2] + rates[(r.runs - 1) / 2]) / 2;
    return r;
}

static void print_row(const char *name, Rate r, double unit, const char *unit_name) {
    printf("%7d  %-20s %9.1f %9.1f %-7s %4d", n_threads, name, r.best / unit, r.median / unit,
           unit_name, r.runs);
}

static void end_row(double ratio, const char *of) {
    if (of) printf("   %.2f %s", ratio, of);
    printf("\n");
    fflush(stdout);
}

typedef struct {  // the machine's own rates with this number of threads
    Rate read, int8, fp32;
} Machine;

static struct {
    Machine last;    // just now
    Machine beside;  // the better of just before and just after a row
    Machine ever;    // the best with this number of threads
} machine;

static Rate better(Rate a, Rate b) { return a.best > b.best ? a : b; }

static Machine measure_machine(void) {
    Machine found = {.int8 = measure(run_peak, INT8, 0.2), .fp32 = measure(run_peak, FP32, 0.2)};
    for (int kernel = 0; kernel < 4; kernel++) {
        found.read = better(found.read, measure(run_read, kernel, 0.2));
    }
    return found;
}

static Machine better_machine(Machine a, Machine b) {
    return (Machine){better(a.read, b.read), better(a.int8, b.int8), better(a.fp32, b.fp32)};
}

// A row is compared with the machine's rates just before and just after it, which this leaves in
// machine.beside: where others use the same host, memory may be half as fast a minute later.
// The last rows show machine.ever instead.
static Rate measure_row(double (*run)(int), int arg, double seconds) {
    const Machine before = machine.last;
    const Rate r = measure(run, arg, seconds);
    machine.last = measure_machine();
    machine.beside = better_machine(before, machine.last);
    machine.ever = better_machine(machine.ever, machine.last);
    return r;
}

// Multiply-adds of a prompt token's products with the layers' matrices
static double token_products(void) {
    const Config *g = &m.config;
    double sum = 0;
    for (int l = 0; l < g->n_layers; l++) {
        const Layer *w = &m.weights.layers[l];
        sum += (double)g->dim * (w->wq.rows + w->wk.rows + w->wv.rows + w->wg.rows + w->wo.cols);
        sum += 3.0 * g->dim * g->hidden_dim * max_int(g->n_experts_used + g->shared_expert, 1);
    }
    return sum;
}

// Multiply-adds of a prompt of n tokens in attention, of queries and keys, and of weights and values
static double attention_products(double n) {
    return n * n * m.config.q_dim * m.config.n_kv_layers;
}

// Bytes of all weights that a token needs: each has its bits and its share of a scale.
static double weight_bytes(void) {
    const Config *g = &m.config;
    double norms = g->n_layers * 2.0 * g->dim + g->n_kv_layers * 2.0 * g->head_dim + g->dim;
    double routers = (double)g->n_layers * all_experts(g) * g->dim;
    double deltas = (g->n_layers - g->n_kv_layers) * (4.0 * g->delta_dim + 2.0 * g->delta_v_heads * (1 + g->dim) + DELTA_DIM);
    double layers = token_products() * g->layer_bits / 8 * (1 + 4.0 / g->group_size);
    double classifier = (double)g->vocab_size * g->dim * (1 + 4.0 / g->group_size);
    return layers + classifier + 4 * (norms + routers + deltas);
}

// Bytes that a token at position pos reads: the weights, the keys and values before it, and states, which are
// written, too
static double token_bytes(int pos) {
    const Config *g = &m.config;
    double kv = (double)g->n_kv_layers * g->n_kv_heads * cell_at(g, 0, 1) * sizeof(float) / LANES;
    return weight_bytes() + pos * kv + 2.0 * sizeof(float) * state_size(g);
}

// What is measured. Each list ends with -1.
typedef struct {
    int prompts[9];    // their lengths
    int positions[9];  // of decoding
    int longest;       // of both
    int seconds;       // that a prompt may take
    int texts[9];      // so many together
    int answer;        // the length of the answers of these
    int packed;        // what is longer than this is measured with -C 8, too
} Plan;

static const Plan usual = {{32, 512, 4096, -1}, {0, 4000, 16000, -1}, 16000, 40, {32, -1}, 16, 512};
static const Plan curve = {{32, 128, 512, 1024, 2048, 4096, 8192, 16384, -1},
                           {32, 128, 512, 1024, 2048, 4096, 8192, 16384, -1}, 16384, 150, {-1}, 0, INT_MAX};
static const Plan kept = {{-1}, {-1}, 512, 0, {-1}, 0, INT_MAX};
static const Plan decode = {{-1}, {0, -1}, 512, 0, {-1}, 0, INT_MAX};
static const Plan many = {{-1}, {0, -1}, 6144, 0, {1, 2, 4, 8, 16, 32, 64, -1}, 16, INT_MAX};

// Would this take longer than one cares to wait? Then it is not run.
static bool too_slow(const char *name, double seconds, int most) {
    if (seconds < most) return false;
    printf("%7d  %-20s skipped, would take %.0f s\n", n_threads, name, seconds);
    return true;
}

static double peak;  // memory_peak() before any list of texts

// The most memory in use beside the mapped file, bytes
static double memory_peak(void) {
    FILE *f = fopen("/proc/self/status", "r");
    char line[256];
    double kilobytes = 0;
    while (f && fgets(line, sizeof(line), f)) sscanf(line, "RssAnon: %lf", &kilobytes);
    if (f) fclose(f);
    if (kilobytes > 0) return kilobytes * 1024;  // it only grows: nothing is given back
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
    return usage.ru_maxrss - weight_bytes();
#else
    return usage.ru_maxrss * 1024.0 - weight_bytes();
#endif
}

// The answers' tokens of a list, beside what its passes take alone. alone: the rate of one text's decoding
static void bench_texts(const char *name, int texts, int prompt, int answer, double alone) {
    const int len = pass->block_len, places = min_int(texts, MOST_TEXTS);
    char beside[64];
    if ((prompt + answer + len - 1) / len * places > pass->n_blocks) {
        printf("%7d  %-20s skipped, the cache is too small\n", n_threads, name);
        return;
    }
    write_list(texts, prompt, answer);
    const Rate passes = measure(run_passes, 0, 2), r = measure(run_texts, 0, 3);
    const Rate again = measure(run_passes, 0, 2);
    remove(list_path);
    snprintf(beside, sizeof(beside), "of its passes alone, %.1f times one text's decoding", r.best / alone);
    print_row(name, r, 1, "tok/s");
    end_row(r.best / better(passes, again).best, beside);
}

// The rows of prompts, which leave the rate of decoding at position 0 in *alone. Decoding comes last and follows
// whatever is in the cache.
static void bench_lengths(const Plan *plan, double *alone) {
    static double of_512;  // the rate of a prompt of 512, in terms of the int8 peak beside it
    const int context = m.context, packed = m.config.cache_bits == 8;
    const char *with = packed ? " -C 8" : "";
    char name[64];
    Rate r = {.best = 1e9};
    for (int i = 0; plan->prompts[i] >= 0; i++) {
        int n = min_int(plan->prompts[i], context - 1);
        if (packed && plan->prompts[i] <= plan->packed) continue;
        snprintf(name, sizeof(name), "prompt of %d%s", n, with);
        if (too_slow(name, n / r.best, plan->seconds)) continue;
        r = measure_row(run_prompt, n, 4);
        print_row(name, r, 1, "tok/s");
        if (n <= 512) {
            of_512 = r.best / machine.beside.int8.best;
            end_row(of_512 * token_products(), "of the int8 peak, by its matmuls");
        } else {  // as fast as a prompt of 512, and attention's rest at the fp32 peak
            double rest = attention_products(n) - n / 512.0 * attention_products(512);
            double least = n / (of_512 * machine.beside.int8.best) + rest / machine.beside.fp32.best;
            end_row(n / r.best / least, "times its floor: as a prompt of 512, attention at the fp32 peak");
        }
    }
    for (int i = 0; plan->positions[i] >= 0; i++) {
        int pos = min_int(plan->positions[i], context - 1);
        if (packed && plan->positions[i] <= plan->packed) continue;
        snprintf(name, sizeof(name), "decode at %d%s", pos, with);
        r = measure_row(run_decode, pos, 3);
        print_row(name, r, 1, "tok/s");
        end_row(r.best * token_bytes(pos) / machine.beside.read.best, "of the memory's rate");
        if (pos == 0) *alone = r.best;
    }
}

// All rows for one number of threads
static void bench(const Plan *plan, int threads) {
    char name[64];
    double alone = 0;  // the rate of decoding at position 0
    n_threads = threads;
    machine.last = machine.ever = measure_machine();
    bench_lengths(plan, &alone);
    use_cache(8);
    bench_lengths(plan, &alone);
    use_cache(32);
    if (peak == 0) peak = memory_peak();
    for (int i = 0; plan->texts[i] >= 0; i++) {
        const int n = plan->texts[i];
        snprintf(name, sizeof(name), "%d text%s together", n, n > 1 ? "s" : "");
        if (n <= MOST_TEXTS) bench_texts(name, n, 1, plan->answer, alone);
    }
    if (plan == &many && threads > 1) bench_texts("64 of 30, 128 each", 64, 30, 128, alone);
    machine.last = measure_machine();
    machine.ever = better_machine(machine.ever, machine.last);
    print_row("memory read", machine.ever.read, 1e9, "GB/s");
    end_row(0, NULL);
    print_row("int8 peak", machine.ever.int8, 1e9, "GMAC/s");
    end_row(0, NULL);
    print_row("fp32 peak", machine.ever.fp32, 1e9, "GFMA/s");
    end_row(0, NULL);
}

// Maps the synthetic model that the arguments describe: a shape, bits, group, layers
static void map_described(int argc, char **argv) {
    int value[3] = {8, 0, 0};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++) {
        if (strcmp(argv[0], shapes[i].name) != 0) continue;
        for (int j = 0; j < 3 && j + 1 < argc; j++) value[j] = atoi(argv[j + 1]);
        const int bits = value[0], layers = value[2] > 0 ? value[2] : shapes[i].n_layers;
        const int group = value[1] ? value[1] : bits == 4 ? 32 : 64;
        if ((bits != 4 && bits != 8) || group < 32 || group > 256 || group & (group - 1))
            die_usage("bad BITS or GROUP, expected 4 or 8; 32, 64, 128 or 256, found %d; %d", bits, group);
        if (value[2] < 0 || value[2] > 4096 || argc > 4)
            die_usage("bad LAYERS, expected 0 (the model's) to 4096, and nothing after it");
        map_synthetic(&shapes[i], bits, group, layers);
        return;
    }
    die_usage("%s: no such shape, expected 0.6b, 4b, 8b, 30b-a3b, 0.8b or a file MODEL.bin", argv[0]);
}

int main(int argc, char **argv) {
    const int cores = cpu_count();
    const Config *g = &m.config;
    const Plan *plan = &usual;
    const char *help = "usage: tests/bench [curve|texts|decode|kept] MODEL.bin | SHAPE [BITS [GROUP [LAYERS]]], "
                       "SHAPE is 0.6b, 4b, 8b, 30b-a3b or 0.8b";
    if (argc > 1 && strcmp(argv[1], "curve") == 0) plan = &curve, argc--, argv++;
    else if (argc > 1 && strcmp(argv[1], "texts") == 0) plan = &many, effort = 0.5, argc--, argv++;
    else if (argc > 1 && strcmp(argv[1], "kept") == 0) plan = &kept, argc--, argv++;
    else if (argc > 1 && strcmp(argv[1], "decode") == 0) plan = &decode, effort = 0.2, argc--, argv++;
    if (argc < 2) die_usage("%s", help);
    if (strcmp(argv[1], "-h") == 0) return puts(help) == EOF;
    const char *end = strrchr(argv[1], '.');
    if (end && strcmp(end, ".bin") == 0) mapped = model_map(&m, argv[1], true);
    else map_described(argc - 1, argv + 1);
    printf("qwen3 (%s): %d layers of %d with %d bits, vocabulary %d, group %d: %.0f MB a token, "
           "%.1f million multiply-adds in its matmuls\n\n", SIMD, g->n_layers, g->dim, g->layer_bits,
           g->vocab_size, g->group_size, weight_bytes() / 1e6, token_products() / 1e6);
    if (plan == &many) {  // what bounds them
        const int pos = 1 + many.answer / 2;
        printf("a row with its logits: %.1f million multiply-adds; keys and values before position %d: %.1f MB\n\n",
               (token_products() + (double)g->vocab_size * g->dim) / 1e6, pos,
               (token_bytes(pos) - token_bytes(0)) / 1e6);
    }
    if (weight_bytes() < 5e6) effort = 0.02;
    printf("threads                            best    median         runs   of what the machine does\n");
    start_threads(cores);
    const int batch = parse_options(2, (char *[]){"", "MODEL"}).batch;
    // 16,000 positions take gigabytes: a quarter of the memory must hold them.
    m.config.cache_bits = 32;
    m.context = min_int((int)fmin(plan->longest, fmax(6144, memory_size() / 4 / position_size(g))) + 1, g->max_seq_len);
    for (int packed = 0; packed < 2; packed++) {
        m.config.cache_bits = packed ? 8 : 32;
        pass = passes[packed] = pass_init(&m, batch, MOST_TEXTS, 1);
        // A prompt may be skipped, and pages that were never written are quick to read.
        memset(pass->cache, 0, (size_t)pass->n_blocks * block_size(g) * sizeof(float));
    }
    use_cache(32);
    make_tokenizer();
    text = whole_cache(pass);
    for (int i = 0; i < MOST_TEXTS; i++) states[i] = alloc(state_size(g), sizeof(float), "a test");
    m.state.delta = states[0];
    for (int i = 0; i < plan->longest; i++) ids[i] = (int)((i * 7919LL + 13) % g->vocab_size);
    read_start = (const char *)m.weights.layers[0].rms_att;
    read_blocks = (int)(weight_bytes() / READ_BLOCK);
    bench(plan, n_threads);
    for (int bits = 32; bits >= 8 && (plan == &usual || plan == &kept); bits -= 24) {
        m.config.cache_bits = bits;
        bench_kept();
    }
    m.config.cache_bits = 32;
    if (cores > 1 && plan != &kept) bench(plan, 1);
    printf("\nmemory beside the mapped file: %.0f MB, of which caches of %d positions, with 32 and with 8 bits: %.0f MB\n",
           peak / 1e6, m.context, 1.3125 * (token_bytes(m.context) - token_bytes(0)) / 1e6);
}
