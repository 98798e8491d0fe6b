/* qwen3.c - Qwen3 inference in one C file: no packages, just libc, libm and threads.

   ./qwen3 model.bin -i "What is the capital of France?"

   What runs here: map the checkpoint (model_map), cut the text into tokens (encode_raw, render),
   run the transformer over them in batches (prefill), then one by one: score every token of
   the vocabulary as the next (classify: the logits), draw one (sample), print it (writer_token) and
   run it through the layers (forward), until the answer ends (generate).

   A token is a vector x (dim) that goes through n_layers layers, each of which is (HF
   modeling_qwen3):

     h = rmsnorm(x, rms_att)                  rmsnorm(x, w) = w * x / sqrt(mean(x^2) + eps)
     q = Wq h, k = Wk h, v = Wv h             n_heads, n_kv_heads and n_kv_heads vectors (head_dim)
     q = rope(rmsnorm(q, q_norm), pos)        QK-norm: each head is normalised by itself
     k = rope(rmsnorm(k, k_norm), pos)        k and v are appended to the cache
     a = softmax(q . K / sqrt(head_dim)) V    per head, over positions 0 .. pos (causal);
                                              n_heads / n_kv_heads of them share a K and V
     x = x + Wo a
     h = rmsnorm(x, rms_ffn)
     x = x + W2 (silu(W1 h) * (W3 h))         silu(z) = z / (1 + exp(-z))

   rope turns each pair (x[j], x[j + head_dim/2]) by the angle pos * theta^(-2j / head_dim), so that
   q . k depends on how far apart two tokens are. Qwen2 and Qwen2.5 have no QK-norm, but biases:
   q = Wq h + bq, k = Wk h + bk, v = Wv h + bv.

   The scores of the next token are  logits = Wcls rmsnorm(x, rms_final)  (vocab_size).

   model.bin: a 256-byte header (Config below), then the weights, all little-endian:

     fp32 norms   rms_att (n_layers, dim), rms_ffn (n_layers, dim), rms_final (dim),
                  q_norm (n_layers, head_dim), k_norm (n_layers, head_dim)
     Q8_0         token embedding (vocab_size, dim); all layers' Wq, then all Wk, Wv, Wo, W1, W2,
                  W3; and Wcls (vocab_size, dim) unless it is the embedding
     fp32 biases  Qwen2, which has no q_norm and k_norm above: all layers' bq (q_dim), then all bk
                  (kv_dim), bv (kv_dim)

   A Q8_0 matrix (out, in) is out*in int8 values, row by row, then one fp32 scale for every
   group_size consecutive values of a row: w ~= q * scale. The vectors it is multiplied
   with are quantized the same way: a group's dot product is an exact integer. MIT license. */

// ------------------------------------------------------------------------------------------------
// Includes, and everything that depends on the platform

#if __SIZEOF_POINTER__ < 8 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "qwen3.c needs a 64-bit little-endian machine: models are mapped as they are"
#endif

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifndef NO_THREADS
#include <pthread.h>
#endif
#ifdef _WIN32
#include <conio.h>
#include <windows.h>
#undef CONTEXT_FULL
#else
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
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

#define VERSION "1.0"
#define INLINE static inline __attribute__((always_inline, unused))
#define NOINLINE static __attribute__((noinline))  // one copy: the same bits for every caller
// Loops over registers are unrolled in full, matmul_tile's over words twice: 1 % of a prompt.
#if defined(NO_UNROLL)  // with sanitizers, compilers take minutes over what is unrolled
#define UNROLL
#define UNROLL_2
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_2 _Pragma("clang loop unroll_count(2)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_2 _Pragma("GCC unroll 2")
#endif

// Tells a spinning core that it waits.
INLINE void cpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static volatile sig_atomic_t dimmed;  // the terminal writes dim now

#ifdef _WIN32
// POSIX as far as it is used here: what MinGW lacks, or has neither for UTF-8 nor for large files.
#define PRINTF __MINGW_PRINTF_FORMAT
#define SIGPIPE (-1)
#define SIGBUS (-1)
#define SA_RESETHAND 0
#define O_NONBLOCK 0
#define MAP_FAILED NULL
#define mmap(at, size, protection, flags, fd, offset) map_file(fd)
#define open(path, flags) _wopen(wide(path), (flags) | _O_BINARY)
#define access(path, mode) _waccess(wide(path), mode)
#define isatty(fd) GetConsoleMode(handle(fd), &(DWORD){0})
#define write write_bytes
#define getline read_line_utf8  // newer MinGWs have one, but not for consoles

static struct sigaction { void (*sa_handler)(int); int sa_flags; } on_ctrl_c;

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

static BOOL WINAPI on_console_event(DWORD event) {
    return event == CTRL_C_EVENT && (on_ctrl_c.sa_handler(SIGINT), TRUE);
}

static int sigaction(int number, const struct sigaction *action, void *old) {
    if (number != SIGINT || old) return -1;
    on_ctrl_c = *action;
    return SetConsoleCtrlHandler(on_console_event, TRUE) ? 0 : -1;
}

// A console gives a line as UTF-16, which ends in \r\n, or at Ctrl-D or Ctrl-Z.
static ssize_t getline(char **line, size_t *cap, FILE *file) {
    static wchar_t text[8192];
    CONSOLE_READCONSOLE_CONTROL ends = {sizeof(ends), 0, 1 << 4 | 1 << 26, 0};
    DWORD n = 0;
    if (*cap == 0 && !(*line = malloc(*cap = 3 * sizeof(text)))) return -1;
    if (!isatty(STDIN_FILENO)) {
        for (int c = 0; c != '\n' && (c = fgetc(file)) != EOF; (*line)[n++] = (char)c) {
            if (n == *cap && !(*line = realloc(*line, *cap *= 2))) return -1;
        }
    } else if (ReadConsoleW(handle(STDIN_FILENO), text, 8192, &n, &ends) && n > 0) {
        if (text[n - 1] == 4 || text[n - 1] == 26) n--;
        else if (n > 1 && text[n - 2] == '\r') text[--n - 1] = '\n';
        n = WideCharToMultiByte(CP_UTF8, 0, text, n, *line, *cap, NULL, NULL);
    } else {
        Sleep(100);  // Ctrl-C: its handler runs in a thread of its own
    }
    return n > 0 ? (ssize_t)n : -1;
}

// Is a pasted block still coming in? Its lines arrive together.
static bool input_waits(void) {
    Sleep(30);
    return _kbhit();
}

static void restore_terminal(void) {
    if (dimmed) write(STDOUT_FILENO, "\033[0m", 4);
}

// The number of cores this process may use.
static int cpu_count(void) {
    DWORD_PTR mine, all;
    GetProcessAffinityMask(GetCurrentProcess(), &mine, &all);
    return __builtin_popcountll(mine);
}

// Arguments become UTF-8 (where their UTF-16 was), files bytes; the console takes UTF-8 and dims.
static void start_platform(int *argc, char ***argv) {
    static char text[3 * 32768], *arg = text;  // a command line has 32767 characters at most
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
#define PRINTF printf

#ifdef __linux__
// The numbers (at most two) that folder/name begins with; returns how many.
static int read_numbers(long long *numbers, const char *folder, const char *name) {
    char path[8192];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *f = fopen(path, "r");
    int n = f ? fscanf(f, "%lld %lld", &numbers[0], &numbers[1]) : 0;
    if (f) fclose(f);
    return n > 0 ? n : 0;
}

// The cores' worth of time that this process's cgroup and those above it leave it, or INT_MAX.
// Version 2 has a file "QUOTA PERIOD" in each; of version 1, whose files are two, a container sees
// its own. No limit is "max" or -1.
static int cgroup_cores(void) {
    char folder[4200] = "/sys/fs/cgroup/cpu";
    double cores = INT_MAX;
    FILE *f = fopen("/proc/self/cgroup", "r");
    if (f) (void)!fscanf(f, "0::%4095[^\n]", strrchr(folder, '/'));  // version 2: 0::/PATH
    if (f) fclose(f);
    for (char *end; (end = strrchr(folder, '/')); *end = 0) {
        long long time[6];  // quota, period
        int n = read_numbers(time, folder, "cpu.max");
        n += read_numbers(time + n, folder, "cpu.cfs_quota_us");
        n += read_numbers(time + n, folder, "cpu.cfs_period_us");
        if (n == 2 && time[0] > 0 && time[1] > 0)
            cores = fmin(cores, ceil((double)time[0] / time[1]));
    }
    return (int)cores;
}

// How many cores the CPUs of this set are: those of one core name the same first sibling.
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

// The number of cores this process may use; two threads on one core are no faster than one.
static int cpu_count(void) {
#ifdef __linux__
    cpu_set_t set;
    int quota = cgroup_cores(), cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = physical_cores(&set);
    return cores < quota ? cores : quota;
#elif defined(__APPLE__)
    int cores = 0;  // the fast ones
    size_t size = sizeof(cores);
    if (sysctlbyname("hw.perflevel0.physicalcpu", &cores, &size, NULL, 0) == 0 && cores > 0)
        return cores;
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

static volatile sig_atomic_t uncooked;  // input_waits() has changed the terminal's mode from
static struct termios cooked;

// Is a pasted block still coming in? Its lines arrive together. A last line without a newline is
// held back by the terminal: without ICANON it can be counted.
static bool input_waits(void) {
    int waiting = 0;
    if (ioctl(STDIN_FILENO, FIONREAD, &waiting) == 0 && waiting > 0) return true;
    nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
    if (tcgetattr(STDIN_FILENO, &cooked) != 0) return false;
    struct termios raw = cooked;
    raw.c_lflag &= ~(tcflag_t)ICANON;
    uncooked = true;
    tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    ioctl(STDIN_FILENO, FIONREAD, &waiting);
    tcsetattr(STDIN_FILENO, TCSANOW, &cooked);
    uncooked = false;
    return waiting > 0;
}

// For signal handlers: the terminal as it was, unless it takes nothing more.
static void restore_terminal(void) {
    bool ready = poll(&(struct pollfd){STDOUT_FILENO, POLLOUT, 0}, 1, 0) == 1;
    if (dimmed && ready) (void)!write(STDOUT_FILENO, "\033[0m", 4);
    if (uncooked) tcsetattr(STDIN_FILENO, TCSANOW, &cooked);
}

static void start_platform(int *argc, char ***argv) { (void)argc, (void)argv; }
#endif

// Seconds since some fixed point.
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// ------------------------------------------------------------------------------------------------
// Errors, memory, byte strings

enum { EXIT_USAGE = 2, EXIT_INTERRUPT = 130 };

static bool quiet;                         // -q
static volatile sig_atomic_t interrupted;  // by Ctrl-C
static volatile sig_atomic_t stoppable;    // the prompt is read; before, Ctrl-C ends the program

// One line on stderr, whatever the arguments hold: "qwen3: WHERE: WHAT, expected X, found Y"
__attribute__((format(PRINTF, 1, 2))) static void report(const char *fmt, ...) {
    char line[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    for (char *c = line; *c; c++) *c = (unsigned char)*c < ' ' || *c == 127 ? '?' : *c;
    fprintf(stderr, "qwen3: %s\n", line);
}

#define die(...) (report(__VA_ARGS__), exit(EXIT_FAILURE))        // a file, memory or model error
#define die_usage(...) (report(__VA_ARGS__), exit(EXIT_USAGE))    // the command line is wrong
#define notice(...) (quiet ? (void)0 : report(__VA_ARGS__))       // worth knowing, but no error

// count zeroed elements at a multiple of 64 bytes, kept until the program ends. Untouched pages
// cost nothing.
static void *alloc(size_t count, size_t size, const char *what) {
    char *p = count < (SIZE_MAX - 64) / size ? calloc(count * size + 64, 1) : NULL;
    if (!p) die("memory: not enough for %s, expected %.0f MB", what, count * (double)size / 1e6);
    return p + (-(uintptr_t)p & 63);
}

typedef struct {  // bytes that belong to somebody else: text is never NUL-terminated here
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

// Room for `more` elements of `size` bytes after the first n.
static void *grow(void *p, size_t *cap, size_t n, size_t more, size_t size) {
    if (n + more <= *cap) return p;
    *cap = n + more > 2 * *cap ? n + more : 2 * *cap;
    p = realloc(p, *cap * size);
    if (!p) die("memory: not enough for text, expected %.0f MB", *cap * (double)size / 1e6);
    return p;
}

static void buffer_add(Buffer *b, Bytes text) {
    b->p = grow(b->p, &b->cap, b->n, text.n + 1, 1);
    if (text.n) memcpy(b->p + b->n, text.p, text.n);
    b->n += text.n;
}

static void ids_add(Ids *ids, int id) {
    ids->p = grow(ids->p, &ids->cap, ids->n, 1, sizeof(int));
    ids->p[ids->n++] = id;
}

static Bytes bytes(const char *s) { return (Bytes){(const uint8_t *)s, strlen(s)}; }

static bool bytes_equal(Bytes a, Bytes b) {
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

static Bytes bytes_from(Bytes b, size_t start) {  // an empty text may have no address
    return (Bytes){start ? b.p + start : b.p, b.n - start};
}

// Appends ids, separated by spaces, and a newline.
static void buffer_add_ids(Buffer *b, const Ids *ids) {
    char number[16];
    for (size_t i = 0; i < ids->n; i++) {
        snprintf(number, sizeof(number), i ? " %d" : "%d", ids->p[i]);
        buffer_add(b, bytes(number));
    }
    buffer_add(b, bytes("\n"));
}

INLINE int min_int(int a, int b) { return a < b ? a : b; }
INLINE int max_int(int a, int b) { return a > b ? a : b; }
INLINE int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// The float with these bits, and the bits (4 bytes at p, at any address) of one.
INLINE float as_float(uint32_t bits) {
    return (union { uint32_t bits; float value; }){bits}.value;
}

INLINE int32_t load_i32(const void *p) {
    int32_t value;
    memcpy(&value, p, 4);
    return value;
}

// The whole file, mapped read-only.
static Bytes file_map(const char *path) {
    int fd = open(path, O_RDONLY | O_NONBLOCK);  // a named pipe is refused, not waited for
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) die("%s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode)) die("%s: wrong kind of file, expected a regular file", path);
    if (st.st_size == 0) die("%s: wrong size, expected a model file, found 0 bytes", path);
    void *p = mmap(NULL, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) die("%s: can't be mapped: %s", path, strerror(errno));
    close(fd);
    return (Bytes){p, st.st_size};
}

// Everything that fd has to give.
static void file_read(Buffer *b, int fd, const char *name) {
    for (;;) {
        b->p = grow(b->p, &b->cap, b->n, 65536, 1);
        ssize_t got = read(fd, b->p + b->n, b->cap - b->n);
        if (got == 0) return;
        if (got < 0 && errno != EINTR) die("%s: %s", name, strerror(errno));
        if (got > 0) b->n += got;
        if (b->n >= INT_MAX) die("%s: too long, expected less than 2 GB", name);
    }
}

// Takes a file apart from front to back; never reads behind its end.
typedef struct {
    const char *file;
    Bytes rest;
} Cursor;

static const void *take(Cursor *c, uint64_t size, const char *what) {
    if (size > c->rest.n)
        die("%s: file ends inside %s, expected %llu more bytes, found %zu", c->file, what,
            (unsigned long long)size, c->rest.n);
    const void *p = c->rest.p;
    c->rest = bytes_from(c->rest, size);
    return p;
}

static uint32_t take_u32(Cursor *c, const char *what) {
    uint32_t value;
    memcpy(&value, take(c, 4, what), 4);
    return value;
}

static float take_f32(Cursor *c, const char *what) { return as_float(take_u32(c, what)); }

// ------------------------------------------------------------------------------------------------
// The model: shapes are (rows, columns) = (out, in), as torch.nn.Linear stores its weight

typedef struct {
    int dim;                // width of the residual stream; HF hidden_size
    int hidden_dim;         // width of the feed-forward; HF intermediate_size
    int n_layers;
    int n_heads;            // query heads
    int n_kv_heads;         // key and value heads, each serves n_heads / n_kv_heads query heads
    int vocab_size;
    int max_seq_len;        // positions the model was made for; HF max_position_embeddings
    int head_dim;           // n_heads * head_dim need not be dim
    int shared_classifier;  // 1: Wcls is the token embedding; HF tie_word_embeddings
    int group_size;         // values that share a scale
    float rope_theta;
    float rms_norm_eps;
    int rope_scaling;       // 0 none, 1 YaRN, which needs the next six
    float yarn_factor;
    int yarn_original_len;  // HF original_max_position_embeddings
    float yarn_beta_fast, yarn_beta_slow;
    float yarn_attention_factor;
    int yarn_no_rounding;   // HF truncate: false
    int qkv_bias;           // 1: Wq, Wk and Wv have biases (Qwen2)
    int no_qk_norm;         // 1: no QK-norm (Qwen2)
    int q_dim, kv_dim;      // n_heads * head_dim, n_kv_heads * head_dim
} Config;

typedef struct {         // a Q8_0 matrix (rows, cols) inside the mapped file
    const int8_t *q;     // (rows, cols), then its scales or more: group_terms may read 32 bytes on
    const float *scale;  // (rows, cols / group)
    int rows, cols, group;
} Matrix;

typedef struct {
    const float *rms_att, *rms_ffn;  // (dim)                 input_, post_attention_layernorm
    const float *q_norm, *k_norm;    // (head_dim) or NULL    self_attn.{q,k}_norm
    const float *bq;                 // (q_dim) or NULL       self_attn.q_proj.bias
    const float *bk, *bv;            // (kv_dim) or NULL      self_attn.{k,v}_proj.bias
    Matrix wq;                       // (q_dim, dim)          self_attn.q_proj
    Matrix wk, wv;                   // (kv_dim, dim)         self_attn.{k,v}_proj
    Matrix wo;                       // (dim, q_dim)          self_attn.o_proj
    Matrix w1, w3;                   // (hidden_dim, dim)     mlp.{gate,up}_proj
    Matrix w2;                       // (dim, hidden_dim)     mlp.down_proj
} Layer;

typedef struct {
    Matrix embedding;       // (vocab_size, dim)              model.embed_tokens
    Layer *layers;          // (n_layers)                     model.layers.N
    const float *rms_final; // (dim)                          model.norm
    Matrix classifier;      // (vocab_size, dim)              lm_head
} Weights;

// The quantized inputs of a product, a row for each token; more rows follow, for the last tile. A
// row's q, scale and start lie side by side in memory, so that one stride serves all three.
typedef struct {
    int8_t *q;       // (n, cols)
    float *scale;    // (n, cols / group)
    int32_t *start;  // (n, cols / group) -W_BIAS * the sum of the group's q: see dot4
    size_t stride;   // words (4 bytes) from row to row
} Quantized;

typedef struct {
    int seq_len;       // positions the cache has room for
    int batch;         // most tokens of one forward pass
    float *x;          // (batch, dim)         the residual stream
    float *delta;      // (batch, dim)         what a block adds to it; then the next block's input
    float *q;          // (batch, q_dim)       the queries, then the heads' answers
    float *cos, *sin;  // (batch, head_dim / 2)
    float *freq;       // (head_dim / 2)       rope: radians per position
    float rope_scale;  //                      YaRN's factor on cos and sin, else 1
    Quantized xq;      // (batch, dim)
    Quantized aq;      // (batch, q_dim)
    Quantized hq;      // (batch, hidden_dim)  silu(W1 h) * (W3 h)
    float *kv;         // (blocks of LANES positions, n_layers, n_kv_heads, kv_floats): kv_block()
    size_t kv_floats;  // in one block, of one layer and kv head
    float **scratch;   // one per thread: attention's (see AttRows), or linear()'s
    float **part;      // one per thread: (batch, head_dim) of k or v, or twice (batch, group) of
                       // W1 h and W3 h: used up by the task that made them
    float *logits;     // (logit_rows, vocab_size)
    int logit_rows;
    int passes;        // forward passes so far
} State;

typedef struct {
    Config config;
    Weights weights;
    State state;
} Model;

// ------------------------------------------------------------------------------------------------
// The checkpoint: check the header, cut the map into tensors

// One field of the header, which must be in [low, high].
static int header_int(Cursor *c, const char *name, int low, int high) {
    int value = (int)take_u32(c, name);
    if (value < low || value > high)
        die("%s: bad %s, expected %d to %d, found %d", c->file, name, low, high, value);
    return value;
}

// The same for a float; 0 stands for `base`, the base format's constant, if it has one.
static float header_float(Cursor *c, const char *name, float low, float high, float base) {
    float value = take_f32(c, name);
    if (value == 0) value = base;
    if (!(value >= low && value <= high))
        die("%s: bad %s, expected %g to %g, found %g", c->file, name, low, high, value);
    return value;
}

static void check_multiple(Cursor *c, const char *name, int64_t value, int unit) {
    if (value > INT_MAX || value % unit != 0)
        die("%s: bad %s, expected a multiple of %d below 2^31, found %lld", c->file, name, unit,
            (long long)value);
}

static void read_header(Config *g, Cursor *c) {
    static const char unknown[] = "unknown header field (made by a newer export.py?)";
    uint32_t magic = take_u32(c, "magic");
    if (magic != 0x616A6331)
        die("%s: not a qwen3.c model, expected a file made by export.py (magic 0x616a6331), "
            "found 0x%08x", c->file, magic);
    header_int(c, "version", 1, 1);
    g->dim = header_int(c, "dim", 1, INT_MAX);
    g->hidden_dim = header_int(c, "hidden_dim", 1, INT_MAX);
    g->n_layers = header_int(c, "n_layers", 1, INT_MAX);
    g->n_heads = header_int(c, "n_heads", 1, INT_MAX);
    g->n_kv_heads = header_int(c, "n_kv_heads", 1, INT_MAX);
    g->vocab_size = header_int(c, "vocab_size", 1, 1 << 30);
    g->max_seq_len = header_int(c, "max_seq_len", 1, 1 << 30);
    g->head_dim = header_int(c, "head_dim", 1, INT_MAX);
    g->shared_classifier = header_int(c, "shared_classifier", 0, 1);
    g->group_size = header_int(c, "group_size", 32, 256);
    if (g->group_size & (g->group_size - 1))
        die("%s: bad group_size, expected 32, 64, 128 or 256, found %d", c->file, g->group_size);
    check_multiple(c, "dim", g->dim, g->group_size);
    check_multiple(c, "hidden_dim", g->hidden_dim, g->group_size);
    check_multiple(c, "head_dim", g->head_dim, 2);
    if (g->n_heads % g->n_kv_heads != 0)
        die("%s: bad n_kv_heads, expected a divisor of %d heads, found %d", c->file, g->n_heads,
            g->n_kv_heads);
    check_multiple(c, "n_heads * head_dim", (int64_t)g->n_heads * g->head_dim, g->group_size);
    g->q_dim = g->n_heads * g->head_dim;
    g->kv_dim = g->n_kv_heads * g->head_dim;
    // the extension, all zero in a base file
    g->rope_theta = header_float(c, "rope_theta", 1e-6f, 1e12f, 1e6f);
    g->rms_norm_eps = header_float(c, "rms_norm_eps", FLT_MIN, 1e12f, 1e-6f);
    g->rope_scaling = header_int(c, "rope_scaling", 0, 1);
    if (g->rope_scaling) {
        g->yarn_factor = header_float(c, "YaRN factor", 1e-6f, 1e12f, 0);
        g->yarn_original_len = header_int(c, "YaRN original length", 1, INT_MAX);
        g->yarn_beta_fast = header_float(c, "YaRN beta_fast", 1e-6f, 1e12f, 32);
        g->yarn_beta_slow = header_float(c, "YaRN beta_slow", 1e-6f, 1e12f, 1);
        float base = 0.1f * logf(g->yarn_factor) + 1;
        g->yarn_attention_factor = header_float(c, "YaRN attention_factor", 1e-6f, 1e12f, base);
        g->yarn_no_rounding = header_int(c, "YaRN truncate flag", 0, 1);
    } else {
        for (int at = 0x3C; at < 0x54; at += 4) header_int(c, unknown, 0, 0);
    }
    g->qkv_bias = header_int(c, "qkv_bias", 0, 1);
    g->no_qk_norm = header_int(c, "no_qk_norm", 0, 1);
    for (int at = 0x5C; at < 256; at += 4) header_int(c, unknown, 0, 0);
}

static Matrix take_matrix(Cursor *c, const Config *g, int rows, int cols, const char *what) {
    Matrix w = {.rows = rows, .cols = cols, .group = g->group_size};
    uint64_t count = (uint64_t)rows * cols;
    w.q = take(c, count, what);
    w.scale = take(c, count / g->group_size * sizeof(float), what);
    return w;
}

static void model_map(Model *m, const char *path) {
    Config *g = &m->config;
    Weights *w = &m->weights;
    Bytes file = file_map(path);
    Cursor c = {path, file};
    read_header(g, &c);
    // so that a damaged n_layers is an error of the file, not of memory
    take(&(Cursor){path, c.rest}, (uint64_t)g->n_layers * g->dim * 4, "rms_att");
    w->layers = alloc(g->n_layers, sizeof(Layer), "the layers");
#define TAKE_LAYERS(name, tensor) \
    for (int i = 0; i < g->n_layers; i++) w->layers[i].name = tensor
#define TAKE_FLOATS(name, count) TAKE_LAYERS(name, take(&c, (uint64_t)(count) * 4, #name))
#define TAKE_MATRIX(name, rows, cols) TAKE_LAYERS(name, take_matrix(&c, g, rows, cols, #name))
    TAKE_FLOATS(rms_att, g->dim);
    TAKE_FLOATS(rms_ffn, g->dim);
    w->rms_final = take(&c, (uint64_t)g->dim * 4, "rms_final");
    if (!g->no_qk_norm) {
        TAKE_FLOATS(q_norm, g->head_dim);
        TAKE_FLOATS(k_norm, g->head_dim);
    }
    w->embedding = take_matrix(&c, g, g->vocab_size, g->dim, "the token embedding");
    TAKE_MATRIX(wq, g->q_dim, g->dim);
    TAKE_MATRIX(wk, g->kv_dim, g->dim);
    TAKE_MATRIX(wv, g->kv_dim, g->dim);
    TAKE_MATRIX(wo, g->dim, g->q_dim);
    TAKE_MATRIX(w1, g->hidden_dim, g->dim);
    TAKE_MATRIX(w2, g->dim, g->hidden_dim);
    TAKE_MATRIX(w3, g->hidden_dim, g->dim);
    w->classifier = g->shared_classifier ? w->embedding
                    : take_matrix(&c, g, g->vocab_size, g->dim, "the classifier");
    if (g->qkv_bias) {
        TAKE_FLOATS(bq, g->q_dim);
        TAKE_FLOATS(bk, g->kv_dim);
        TAKE_FLOATS(bv, g->kv_dim);
    }
    if (c.rest.n != 0)
        die("%s: wrong size, expected %zu bytes, found %zu", path, file.n - c.rest.n, file.n);
}

// ------------------------------------------------------------------------------------------------
// Threads: parallel() runs a loop on all of them. A worker that has nothing to do spins for a
// moment and then sleeps, so that a busy machine is not kept busier. Shares go to whoever
// comes first: what is computed does not depend on who computes it.

typedef void (*Job)(void *arg, int begin, int end, int thread);

static int n_threads = 1;

#ifdef NO_THREADS
static void start_threads(int count) { (void)count; }

static void parallel(Job job, void *arg, int count, int chunk) {
    (void)chunk;
    job(arg, 0, count, 0);
}
#else
enum { SPINS = 2000 };

static struct {
    _Atomic uint64_t ticket;  // number of the loop << 32 | its items that nobody has taken
    _Atomic int finished;     // its items that are done
    _Atomic(Job) job;
    void *_Atomic arg;
    _Atomic int count, chunk;
    _Atomic int sleepers;  // threads that wait for `wake` or `done`; changed under `lock`
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static bool has_work(void) { return (uint32_t)atomic_load(&pool.ticket) > 0; }

static bool is_done(void) { return atomic_load(&pool.finished) == atomic_load(&pool.count); }

// Spins, then sleeps. What makes it ready is stored before wake_up() looks for sleepers.
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

// Takes shares of the current loop until none is left. The exchange fails if the loop has changed
// since the ticket was read, so the job is this loop's: parallel() stores it before the ticket, and
// the next loop's only after the last share is done.
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

// job(arg, begin, end, thread) for pieces of 0 .. count - 1 that begin at multiples of `chunk`:
// large ones first, then smaller, so that all threads end together. Returns when all are done.
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
// Primitives: all that knows the instruction set. A vector is LANES floats or int32s (the GCC and
// clang extension: + - * work lane by lane). HAVE_DOT4: dot4 is fast, and there is an fma.
//
//   dot4(acc, w, x)     acc + sum of the 4 products of the bytes of w and x, in each lane
//   mul_add(a, b, c)    a * b + c, rounded once where the CPU can; mul_add_f of single floats
//   max_i(a, b)         the larger of two int32s, in each lane
//   zip_low, zip_high   a0 b0 a1 b1 ... of the first or of the second halves of a and b
//
// Quantized x lies in -127..127, so no partial sum overflows even if a file's w holds -128. Where
// dot4 takes w as unsigned bytes, W_BIAS is added to them, and each sum starts from
// -W_BIAS * sum(x).

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define USE_AVX512
#define SIMD "AVX-512 VNNI"
enum { LANES = 16, HAVE_DOT4 = 1, TILE_VECS = 2, TILE_TOKENS = 6, W_BIAS = 128 };
#elif defined(__AVX2__) && defined(__FMA__)
#define USE_AVX2
#ifdef __AVXVNNI__
#define SIMD "AVX-VNNI"
enum { LANES = 8, HAVE_DOT4 = 1, TILE_VECS = 1, TILE_TOKENS = 6, W_BIAS = 128 };
#else
#define SIMD "AVX2"
enum { LANES = 8, HAVE_DOT4 = 1, TILE_VECS = 1, TILE_TOKENS = 4, W_BIAS = 0 };
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
#define USE_NEON
#define SIMD "NEON dotprod"
enum { LANES = 4, HAVE_DOT4 = 1, TILE_VECS = 2, TILE_TOKENS = 6, W_BIAS = 0 };
#else
#define SIMD "plain C"
enum { LANES = 4, HAVE_DOT4 = 0, TILE_VECS = 2, TILE_TOKENS = 2, W_BIAS = 0 };
#endif

enum { BLOCK = TILE_VECS * LANES };  // rows that meet all tokens of a batch together
enum { FLIP = W_BIAS ? (int32_t)0x80808080 : 0 };  // + 128 in each byte

typedef float VecF __attribute__((vector_size(4 * LANES)));
typedef int32_t VecI __attribute__((vector_size(4 * LANES)));
typedef uint32_t VecU __attribute__((vector_size(4 * LANES)));  // where sums may overflow
typedef int8_t VecB __attribute__((vector_size(LANES)));

// The portable versions, always compiled: what the others must equal, mul_add but for a rounding.
INLINE int32_t dot_plain(const int8_t *w, const int8_t *x, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; i++) sum += w[i] * x[i];
    return sum;
}

INLINE VecI dot4_plain(VecI acc, VecI w, VecI x) {
    const uint8_t *wb = (const uint8_t *)&w;
    const int8_t *xb = (const int8_t *)&x;
    for (int i = 0; i < 4 * LANES; i++) {
        acc[i / 4] += (W_BIAS ? wb[i] : (int8_t)wb[i]) * xb[i];
    }
    return acc;
}

INLINE VecF mul_add_plain(VecF a, VecF b, VecF c) { return a * b + c; }

INLINE VecI max_plain(VecI a, VecI b) {
    VecI larger = a > b;
    return (a & larger) | (b & ~larger);
}

#if defined(USE_AVX512)
INLINE VecI dot4(VecI acc, VecI w, VecI x) {
    return (VecI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}
#elif defined(__AVXVNNI__)
INLINE VecI dot4(VecI acc, VecI w, VecI x) {
    return (VecI)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, (__m256i)x);
}
#elif defined(USE_AVX2)
// w x = |w| (sign(w) x): one operand without a sign, as the instruction wants it. |w x| sums to an
// int16 for each two.
INLINE VecI dot4(VecI acc, VecI w, VecI x) {
    __m256i u = _mm256_abs_epi8((__m256i)w), s = _mm256_sign_epi8((__m256i)x, (__m256i)w);
    __m256i pairs = _mm256_maddubs_epi16(u, s);
    return acc + (VecI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#elif defined(USE_NEON)
INLINE VecI dot4(VecI acc, VecI w, VecI x) {
    return (VecI)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)x);
}
#else
#define dot4 dot4_plain
#endif

#if defined(USE_AVX512)
INLINE VecF mul_add(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
INLINE VecI max_i(VecI a, VecI b) { return (VecI)_mm512_max_epi32((__m512i)a, (__m512i)b); }
#elif defined(USE_AVX2)
INLINE VecF mul_add(VecF a, VecF b, VecF c) { return _mm256_fmadd_ps(a, b, c); }
INLINE VecI max_i(VecI a, VecI b) { return (VecI)_mm256_max_epi32((__m256i)a, (__m256i)b); }
#elif defined(USE_NEON)
INLINE VecF mul_add(VecF a, VecF b, VecF c) {
    return (VecF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE VecI max_i(VecI a, VecI b) { return (VecI)vmaxq_s32((int32x4_t)a, (int32x4_t)b); }
#else
#define mul_add mul_add_plain
#define max_i max_plain
#endif
INLINE float mul_add_f(float a, float b, float c) { return HAVE_DOT4 ? fmaf(a, b, c) : a * b + c; }

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

INLINE VecI splat(int32_t value) { return (VecI){0} + value; }

INLINE VecF splat_f(float value) { return value - (VecF){0}; }  // no addition: -0 stays

INLINE VecF load_f(const float *p) {
    VecF value;
    memcpy(&value, p, sizeof(value));
    return value;
}

// n <= 4 * LANES bytes, then zeros; n a constant
INLINE VecI load_bytes(const void *p, const int n) {
    VecI value = {0};
    memcpy(&value, p, n);
    return value;
}

// Of all lanes. A vector zipped with itself brings lanes i and i + LANES / 2 together, twice.
INLINE int32_t lanes_max(VecI a) {
    UNROLL for (int n = LANES; n > 1; n /= 2) a = max_i(zip_low(a, a), zip_high(a, a));
    return a[0];
}

INLINE uint32_t lanes_sum(VecU a) {
    UNROLL for (int n = LANES; n > 1; n /= 2) {
        a = (VecU)zip_low((VecI)a, (VecI)a) + (VecU)zip_high((VecI)a, (VecI)a);
    }
    return a[0];
}

// ------------------------------------------------------------------------------------------------
// Kernels. Sums of floats have one fixed order, whatever the number of threads and the batch

// Adding 1.5 * 2^23 leaves no bits for a fraction: |x| < 2^22 is rounded to the nearest integer,
// ties to even, and that stands in the low bits.
#define ROUNDER 12582912.0f

// a if yes is 1, b if it is 0: by masks, as GCC makes no vectors of loops that choose floats
INLINE float choose(int32_t yes, float a, float b) {
    return as_float((load_i32(&a) & -yes) | (load_i32(&b) & (yes - 1)));
}

// exp(x) = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2, and a polynomial for e^r (Cephes
// expf): within 2 units of the last place, exp(0) = 1, exp(88) above 88; below -87.7, where n is
// -127 and the exponent's bits are 0, it is 0. Written so that compilers vectorise loops over it.
INLINE float fast_exp(float x) {
    float clamped = choose(x < -88.0f, -88.0f, choose(x > 88.0f, 88.0f, x));
    float shifted = mul_add_f(clamped, 1.44269504f, ROUNDER), n = shifted - ROUNDER;
    float r = mul_add_f(n, 2.12194440e-4f, mul_add_f(n, -0.693359375f, clamped));
    float p = 1.9875691500e-4f;
    p = mul_add_f(p, r, 1.3981999507e-3f);
    p = mul_add_f(p, r, 8.3334519073e-3f);
    p = mul_add_f(p, r, 4.1665795894e-2f);
    p = mul_add_f(p, r, 1.6666665459e-1f);
    p = mul_add_f(p, r, 5.0000001201e-1f);
    p = mul_add_f(p, r * r, r) + 1;
    return p * as_float(((uint32_t)load_i32(&shifted) + 127) << 23);  // 2^n
}

// Floats are added in 16 interleaved sums, whatever a vector's width: all instruction sets agree.
// sum(x) or sum(x^2), x (n)
INLINE float sum_of(const float *x, int n, const bool squared) {
    VecF acc[16 / LANES] = {0};
    float sums[16];
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        UNROLL for (int j = 0; j < 16 / LANES; j++) {
            VecF v = load_f(x + i + j * LANES);
            acc[j] += squared ? v * v : v;
        }
    }
    memcpy(sums, acc, sizeof(sums));
    for (; i < n; i++) sums[i % 16] += squared ? x[i] * x[i] : x[i];
    for (int half = 8; half > 0; half /= 2) {
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    }
    return sums[0];
}

// out = w * x / sqrt(mean(x^2) + eps), all (n): HF Qwen3RMSNorm
NOINLINE void rmsnorm(float *out, const float *x, const float *w, int n, float eps) {
    float scale = 1 / sqrtf(sum_of(x, n, true) / n + eps);
    for (int i = 0; i < n; i++) out[i] = w[i] * (x[i] * scale);
}

// The largest of x (n > 0). Compared as integers, which order like the floats once the bits of
// negative ones are flipped: a reduction that every compiler vectorises.
NOINLINE float max_of(const float *x, int n) {
    int32_t max = INT32_MIN;
    for (int i = 0; i < n; i++) {
        int32_t bits = load_i32(x + i);
        bits ^= bits >> 31 & 0x7FFFFFFF;
        max = bits > max ? bits : max;
    }
    return as_float(max ^ (max >> 31 & 0x7FFFFFFF));
}

// x = exp(x - max(x)), (n); returns their sum
NOINLINE float softmax_terms(float *x, int n) {
    float max = max_of(x, n);
    for (int i = 0; i < n; i++) x[i] = fast_exp(x[i] - max);
    return sum_of(x, n, false);
}

// gate = silu(gate) * up, all (n): HF Qwen3MLP
NOINLINE void silu_times(float *gate, const float *up, int n) {
    for (int i = 0; i < n; i++) gate[i] = gate[i] / (1 + fast_exp(-gate[i])) * up[i];
}

// Row t of x.
INLINE Quantized quantized_row(const Quantized *x, int t) {
    const size_t at = t * x->stride;
    return (Quantized){x->q + 4 * at, x->scale + at, x->start + at, x->stride};
}

// x (n), in groups, to row t of out from column `at` on: scale = max|x| / 127, q = x / scale,
// rounded. Groups whose scale would be smaller than normal numbers become zeros; infinity becomes
// NaN later.
NOINLINE void quantize(const Quantized *out, int t, int at, const float *x, int n, int group) {
    const Quantized row = quantized_row(out, t);
    int8_t *q = row.q + at;
    for (int i = 0, g = at / group; i < n; i += group, g++) {
        VecI max = {0};
        VecU sum = {0};
        for (int j = i; j < i + group; j += LANES) {  // as integers, |x| have the same order
            max = max_i(max, (VecI)load_f(x + j) & INT32_MAX);
        }
        float largest = as_float(lanes_max(max));
        float inverse = largest < FLT_MIN * 127 ? 0 : 127 / largest;
        for (int j = i; j < i + group; j += LANES) {
            VecI rounded = (VecI)(load_f(x + j) * inverse + ROUNDER) - (VecI)splat_f(ROUNDER);
            VecB bytes = __builtin_convertvector(rounded, VecB);
            memcpy(q + j, &bytes, sizeof(bytes));
            sum += (VecU)rounded;
        }
        row.scale[g] = largest < FLT_MIN * 127 ? 0 : largest / 127;
        row.start[g] = isfinite(largest) ? -W_BIAS * (int32_t)lanes_sum(sum) : 0;
    }
}

// Every product's value is  sum = mul_add((float)(w_g . x_g) * w_scale[g], x_scale[g], sum)  over
// groups g, first to last, so both kernels below give the same bits.

// Transposes: out[i * stride] is word (4 bytes) i of the LANES rows from `row` on; the last row
// stands in for rows behind it. words (rows, cols) ^ flip
INLINE void pack(VecI *out, int stride, const void *words, int rows, int cols, int row,
                 int32_t flip) {
    const char *source[LANES];
    for (int r = 0; r < LANES; r++) {
        source[r] = (const char *)words + (size_t)min_int(row + r, rows - 1) * cols * 4;
    }
    int i = 0;
    for (; i + LANES <= cols; i += LANES) {
        VecI a[LANES], b[LANES];
        UNROLL for (int r = 0; r < LANES; r++) memcpy(&a[r], source[r] + 4 * (size_t)i, sizeof(*a));
        UNROLL for (int n = LANES; n > 1; n /= 2) {  // log2(LANES) perfect shuffles
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

// Lane r is sum(a[r]), of LANES vectors. Each step adds the halves of two vectors in a zip: lanes
// of the two in turn, half as many of each. With a `count` of less than LANES, the first steps are
// done already.
INLINE VecI sum_each(VecI *a, const int count) {
    UNROLL for (int n = count / 2; n > 0; n /= 2) {
        UNROLL for (int r = 0; r < n; r++) {
            a[r] = zip_low(a[r], a[r + n]) + zip_high(a[r], a[r + n]);
        }
    }
    return a[0];
}

// The sums of a[0]'s first half, a[0]'s second half, a[1]'s first, ... of LANES vectors, which fill
// two vectors: a first step that zips the halves and adds nothing, then the others for each half.
INLINE void sum_each_half(VecI *sums, const VecI *a) {
    VecI first[LANES / 2], second[LANES / 2];
    UNROLL for (int r = 0; r < LANES / 2; r++) {
        first[r] = zip_low(a[r], a[r + LANES / 2]);
        second[r] = zip_high(a[r], a[r + LANES / 2]);
    }
    VecI even = sum_each(first, LANES / 2), odd = sum_each(second, LANES / 2);
    sums[0] = zip_low(even, odd);
    sums[1] = zip_high(even, odd);
}

// How far ahead weights (bytes) and their scales (floats) are fetched: the CPU's own prefetching
// stops at a page's end. No multiple of 4,096 bytes: what is read and what is fetched would compete
// for one place in the cache.
enum { AHEAD = 5120, SCALES_AHEAD = 64 };

// A vector of dot4's operands is two groups, a group or a part of one. group is a constant.
#define GROUPS_IN_VEC(group) (4 * LANES == 2 * (group) ? 2 : 1)

// terms[g] = (float)(w_g . x_g) * w_scale[g] for `count` groups; count is mostly constant, LANES *
// GROUPS_IN_VEC(group).
INLINE void group_terms(float *terms, const int8_t *wq, const float *ws, const int8_t *xq,
                        const int32_t *start, const int count, const int group) {
    const int pair = GROUPS_IN_VEC(group), bytes = group * pair, step = min_int(bytes, 4 * LANES);
    const bool whole = HAVE_DOT4 && count == LANES * pair;
    VecI dots[LANES] = {0}, sums[2] = {0};
    int32_t dot[2 * LANES];
    __builtin_prefetch(ws + SCALES_AHEAD);
    for (int v = 0; HAVE_DOT4 && v * pair < count; v++) {
        for (int i = v * bytes; i < (v + 1) * bytes; i += step) {
            __builtin_prefetch(wq + i + AHEAD);
            VecI wv = load_bytes(wq + i, step) ^ splat(FLIP);
            dots[v] = dot4(dots[v], wv, load_bytes(xq + i, step));
        }
    }
    if (pair == 2) sum_each_half(sums, dots);
    else sums[0] = sum_each(dots, LANES);
    for (int i = 0; whole && i < pair; i++) {
        sums[i] += load_bytes(start + i * LANES, sizeof(*sums));
        VecF term = __builtin_convertvector(sums[i], VecF) * load_f(ws + i * LANES);
        memcpy(terms + i * LANES, &term, sizeof(term));
    }
    memcpy(dot, sums, sizeof(dot));
    for (int g = 0; !whole && g < count; g++) {
        if (!HAVE_DOT4) dot[g] = dot_plain(wq + g * group, xq + g * group, group);
        terms[g] = (float)(dot[g] + start[g]) * ws[g];
    }
}

// out = x W^T, (n, cols) x (rows, cols)^T, for some rows and some tokens: one thread's task.
typedef struct {
    float *out;          // (n, stride), its first column for row `row`
    int stride;
    const Matrix *w;     // (rows, cols)
    int row, end;        // rows row .. end - 1 of it
    const Quantized *x;  // (n, cols)
    int first, n;        // tokens first .. n - 1 of it
    float *scratch;      // (BLOCK, cols / 4 + cols / group): packed rows, or matvec's terms
} Linear;

// Token t, LANES rows from `row` on: the terms of one row after the other, then a row per lane.
INLINE void matvec(const Linear *l, int t, int row, const int group) {
    const int cols = l->w->cols, groups = cols / group, most = LANES * GROUPS_IN_VEC(group);
    const int rows = min_int(LANES, l->end - row);
    const int8_t *wq = l->w->q + (size_t)row * cols;
    const float *ws = l->w->scale + (size_t)row * groups;
    const Quantized x = quantized_row(l->x, t);
    VecF sum = {0};
    float *const columns = l->scratch;                            // (groups, LANES)
    float *const terms = columns + groups * LANES, *out = terms;  // (LANES, groups)
    for (int r = 0; r < rows; r++, wq += cols, ws += groups, out += groups) {
        int g = 0;
        for (; g + most <= groups; g += most) {
            group_terms(out + g, wq + g * group, ws + g, x.q + g * group, x.start + g, most, group);
        }
        if (g == groups) continue;
        group_terms(out + g, wq + g * group, ws + g, x.q + g * group, x.start + g, groups - g,
                    group);
    }
    // the memory goes on with later rows while the terms of these are added
    for (int i = 0; i < 512; i += 64) __builtin_prefetch(wq + AHEAD + i);
    pack((VecI *)columns, 1, terms, rows, groups, 0, 0);
    for (int g = 0; g < groups; g++) {
        sum = mul_add(load_f(columns + g * LANES), splat_f(x.scale[g]), sum);
    }
    memcpy(l->out + (size_t)t * l->stride + row - l->row, &sum, rows * sizeof(float));
}

// The same for BLOCK rows from `row` on and TILE_TOKENS tokens from t on (what x holds for tokens
// behind n does not matter). wq (cols / 4, TILE_VECS, LANES, 4) and ws (groups, TILE_VECS, LANES)
// are the packed rows.
INLINE void matmul_tile(const Linear *l, int t, int row, const VecI *wq, const float *ws,
                        const int group) {
    const int cols = l->w->cols, groups = cols / group, rows = min_int(BLOCK, l->end - row);
    const size_t stride = l->x->stride;
    const Quantized x = quantized_row(l->x, t);
    const int8_t *xq = x.q;
    const float *xs = x.scale;
    const int32_t *start = x.start;
    VecF acc[TILE_TOKENS][TILE_VECS] = {0};
    for (const float *end = ws + groups * BLOCK; ws < end; ws += BLOCK, xs++, start++) {
        VecI sum[TILE_TOKENS][TILE_VECS];
        UNROLL for (int i = 0; i < TILE_TOKENS; i++) {
            UNROLL for (int v = 0; v < TILE_VECS; v++) sum[i][v] = splat(start[i * stride]);
        }
        UNROLL_2 for (int k = 0; k < group / 4; k++, xq += 4, wq += TILE_VECS) {
            UNROLL for (int i = 0; i < TILE_TOKENS; i++) {
                VecI four = splat(load_i32(xq + i * stride * 4));
                UNROLL for (int v = 0; v < TILE_VECS; v++) {
                    sum[i][v] = dot4(sum[i][v], wq[v], four);
                }
            }
        }
        UNROLL for (int i = 0; i < TILE_TOKENS; i++) {
            UNROLL for (int v = 0; v < TILE_VECS; v++) {
                VecF term = __builtin_convertvector(sum[i][v], VecF) * load_f(ws + v * LANES);
                acc[i][v] = mul_add(term, splat_f(xs[i * stride]), acc[i][v]);
            }
        }
    }
    for (int i = 0; i < min_int(TILE_TOKENS, l->n - t); i++) {
        float *out = l->out + (size_t)(t + i) * l->stride + row - l->row;
        if (rows == BLOCK) memcpy(out, acc[i], sizeof(acc[i]));
        else memcpy(out, acc[i], rows * sizeof(float));
    }
}

// A block of rows meets all tokens of the batch while it is in the cache, and the next one is
// fetched.
INLINE void linear_block(const Linear *l, int row, const int group) {
    const Matrix *w = l->w;
    if (l->n - l->first == 1 || !HAVE_DOT4) {
        const int end = min_int(row + BLOCK, l->end);
        for (int t = l->first; t < l->n; t++) {
            for (int r = row; r < end; r += LANES) matvec(l, t, r, group);
        }
        return;
    }
    VecI *wq = (VecI *)l->scratch, *ws = wq + w->cols / 4 * TILE_VECS;
    for (int v = 0; v < TILE_VECS; v++) {
        pack(wq + v, TILE_VECS, w->q, w->rows, w->cols / 4, row + v * LANES, FLIP);
        pack(ws + v, TILE_VECS, w->scale, w->rows, w->cols / group, row + v * LANES, 0);
    }
    const int8_t *next = w->q + (size_t)(row + BLOCK) * w->cols;
    const float *next_scale = w->scale + (size_t)(row + BLOCK) * (w->cols / group);
    const int64_t share = (int64_t)BLOCK * w->cols * TILE_TOKENS / (l->n - l->first);
    for (int t = l->first; t < l->n; t += TILE_TOKENS) {
        for (int64_t i = 0; i < share; i += 64) __builtin_prefetch(next + i);
        for (int64_t i = 0; i < share / group; i += 16) __builtin_prefetch(next_scale + i);
        next += share;
        next_scale += share / group;
        matmul_tile(l, t, row, wq, (const float *)ws, group);
    }
}

static void linear(const Linear *l) {
    if (l->first == l->n) return;
    for (int row = l->row; row < l->end; row += BLOCK) {
        switch (l->w->group) {  // a constant in the loops below: half of their speed
        case 32: linear_block(l, row, 32); break;
        case 64: linear_block(l, row, 64); break;
        case 128: linear_block(l, row, 128); break;
        case 256: linear_block(l, row, 256); break;
        }
    }
}

typedef struct {
    State *s;
    Linear all;
} Matmul;

static void matmul_job(void *arg, int begin, int end, int thread) {
    const Matmul *m = arg;
    Linear l = m->all;
    l.row = begin * BLOCK;
    l.end = min_int(end * BLOCK, l.w->rows);
    l.out += l.row;
    l.scratch = m->s->scratch[thread];
    linear(&l);
}

// out = x W^T for tokens first .. n - 1: out (n, rows), x (n, cols), w (rows, cols)
static void matmul(State *s, float *out, const Matrix *w, const Quantized *x, int first, int n) {
    Matmul m = {s, {.out = out, .stride = w->rows, .w = w, .x = x, .first = first, .n = n}};
    parallel(matmul_job, &m, (w->rows + BLOCK - 1) / BLOCK, n - first == 1 ? 2 : 1);
}

// ------------------------------------------------------------------------------------------------
// The transformer: n tokens at positions pos .. pos + n - 1 at once: a batch of the prompt, or a
// decoded token (n = 1), perhaps with a draft of those behind it

// A layer of a forward pass, as its steps see it.
typedef struct Pass {
    Model *m;
    const Layer *layer;
    int l;              // its number
    const float *norm;  // (dim) the weights of the rmsnorm before the current block
    int n, pos;         // tokens, position of the first
    int first;          // tokens before this one need no more than their place in the cache
    void (*step)(const struct Pass *, int t);
} Pass;

static void token_job(void *arg, int begin, int end, int thread) {
    (void)thread;
    const Pass *p = arg;
    for (int t = begin; t < end; t++) p->step(p, p->first + t);
}

// One step for every token of the batch.
static void each_token(Pass *p, void (*step)(const Pass *, int t)) {
    p->step = step;
    parallel(token_job, p, p->n - p->first, 4);
}

// The cache of one layer and kv head for positions block * LANES and on, in the order in which
// attention reads it: keys (head_dim, LANES positions), then values (value_dim / LANES, LANES
// positions, LANES). A block of positions holds all layers, so that memory is touched only as
// positions come into use.
static float *kv_block(const Model *m, int layer, int kv_head, int block) {
    size_t i = ((size_t)block * m->config.n_layers + layer) * m->config.n_kv_heads + kv_head;
    return m->state.kv + i * m->state.kv_floats;
}

// head_dim in whole vectors; what is behind head_dim stays 0.
static int value_dim(const Model *m) { return round_up(m->config.head_dim, LANES); }

// Rotates pairs (x[j], x[j + half]) by the angle of pair j: HF apply_rotary_pos_emb
static void rope(float *x, const float *cos, const float *sin, int half) {
    for (int j = 0; j < half; j++) {
        float a = x[j], b = x[j + half];
        x[j] = a * cos[j] - b * sin[j];
        x[j + half] = b * cos[j] + a * sin[j];
    }
}

// Rows of W for head h of q, k or v, with their bias if the model has it: out (n, stride)
static void project(const Pass *p, float *out, int stride, const Matrix *w, const float *bias,
                    int h, int first, int thread) {
    const State *s = &p->m->state;
    const int hd = p->m->config.head_dim;
    linear(&(Linear){out, stride, w, h * hd, (h + 1) * hd, &s->xq, first, p->n,
                     s->scratch[thread]});
    for (int t = first; bias && t < p->n; t++) {
        for (int j = 0; j < hd; j++) out[(size_t)t * stride + j] += bias[h * hd + j];
    }
}

// QK-norm, if the model has it, and rope of x (head_dim), which is token t's.
static void norm_and_rope(const Pass *p, float *x, const float *norm, int t) {
    const Config *g = &p->m->config;
    const size_t half = g->head_dim / 2;
    if (norm) rmsnorm(x, x, norm, g->head_dim, g->rms_norm_eps);
    rope(x, p->m->state.cos + t * half, p->m->state.sin + t * half, half);
}

static void q_head(const Pass *p, int h, int thread) {
    const Layer *w = p->layer;
    const int q_dim = p->m->config.q_dim;
    float *q = p->m->state.q + h * p->m->config.head_dim;
    project(p, q, q_dim, &w->wq, w->bq, h, p->first, thread);
    for (int t = p->first; t < p->n; t++) norm_and_rope(p, q + (size_t)t * q_dim, w->q_norm, t);
}

static void k_head(const Pass *p, int h, int thread) {
    const int hd = p->m->config.head_dim;
    float *k = p->m->state.part[thread];
    project(p, k, hd, &p->layer->wk, p->layer->bk, h, 0, thread);
    for (int t = 0; t < p->n; t++, k += hd) {
        norm_and_rope(p, k, p->layer->k_norm, t);
        float *keys = kv_block(p->m, p->l, h, (p->pos + t) / LANES) + (p->pos + t) % LANES;
        for (int j = 0; j < hd; j++) keys[j * LANES] = k[j];
    }
}

static void v_head(const Pass *p, int h, int thread) {
    const int hd = p->m->config.head_dim;
    float *v = p->m->state.part[thread];
    project(p, v, hd, &p->layer->wv, p->layer->bv, h, 0, thread);
    for (int t = 0; t < p->n; t++, v += hd) {
        float *values = kv_block(p->m, p->l, h, (p->pos + t) / LANES) + hd * LANES;
        values += (p->pos + t) % LANES * LANES;
        for (int j = 0; j < hd; j += LANES) {
            memcpy(values + j * LANES, v + j, min_int(LANES, hd - j) * sizeof(float));
        }
    }
}

// A task is a head of q, k or v.
static void heads_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const int n_heads = p->m->config.n_heads, n_kv_heads = p->m->config.n_kv_heads;
    for (int i = begin; i < end; i++) {
        if (i < n_heads) q_head(p, i, thread);
        else if (i < n_heads + n_kv_heads) k_head(p, i - n_heads, thread);
        else v_head(p, i - n_heads - n_kv_heads, thread);
    }
}

// A row of attention is one query head of one token:
//   a = softmax(q . K / sqrt(head_dim)) V, values added from the first position to the last.
// Tiles of ATT_ROWS rows by two vectors live in registers. ATT_TASK rows meet two blocks of keys,
// then ATT_VALUES positions of values, while these are near.
enum { ATT_ROWS = 6, ATT_TASK = 24, ATT_VALUES = 64 };

typedef struct {
    int kv_head, n;          // rows, a multiple of the tile's
    size_t width;            // value_dim
    size_t positions;        // seq_len in whole tiles
    float *q;                // (n, width): queries, then the sums of values
    float *score;            // (n, positions), used as far as the last row sees
    float *place[ATT_TASK];  // (head_dim) of the query, and then of the answer
    int len[ATT_TASK];       // positions that the row sees: its own and those before it
} AttRows;

// score = q . k / sqrt(head_dim), rows from r on, for `vecs` blocks of positions from `start` on
INLINE void score_tile(const Pass *p, const AttRows *a, int r, int start, const int rows,
                       const int vecs) {
    const int hd = p->m->config.head_dim;
    const size_t next = kv_block(p->m, 0, 0, 1) - kv_block(p->m, 0, 0, 0), width = a->width;
    const float scale = 1 / sqrtf((float)hd), *q = a->q + r * width;
    float *score = a->score + r * a->positions + start;
    const VecF *keys[2];
    VecF sum[ATT_ROWS][2] = {0};
    for (int v = 0; v < vecs; v++) {
        keys[v] = (VecF *)kv_block(p->m, p->l, a->kv_head, start / LANES + v);
    }
    for (int j = 0; j < hd; j++) {
        for (int v = 0; v < vecs && r == 0; v++) {  // once is enough
            __builtin_prefetch((float *)&keys[v][j] + 2 * next);
        }
        UNROLL for (int i = 0; i < rows; i++) {
            VecF qj = splat_f(q[i * width + j]);
            UNROLL for (int v = 0; v < vecs; v++) sum[i][v] = mul_add(keys[v][j], qj, sum[i][v]);
        }
    }
    for (int i = 0; i < rows; i++, score += a->positions) {
        for (int v = 0; v < vecs; v++) *(VecF *)(score + v * LANES) = sum[i][v] * scale;
    }
}

// sum += score * v over positions start .. end - 1, rows from r on, `vecs` vectors of v from j on
INLINE void value_tile(const Pass *p, const AttRows *a, int r, int start, int end, int j,
                       const int rows, const int vecs) {
    const size_t next = kv_block(p->m, 0, 0, 1) - kv_block(p->m, 0, 0, 0);
    const size_t positions = a->positions, vectors = a->width / LANES;
    const float *score = a->score + r * positions + start;
    VecF *out = (VecF *)a->q + r * vectors + j, sum[ATT_ROWS][2];
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int v = 0; v < vecs; v++) sum[i][v] = out[i * vectors + v];
    }
    for (; start < end; start += LANES) {
        const float *keys = kv_block(p->m, p->l, a->kv_head, start / LANES);
        const VecF *values = (VecF *)keys + p->m->config.head_dim + j * LANES;
        for (int k = 0; k < min_int(LANES, end - start); k++, score++) {
            for (int v = 0; v < vecs && r == 0; v++) {
                __builtin_prefetch((float *)&values[v * LANES + k] + ATT_VALUES / LANES * next);
            }
            UNROLL for (int i = 0; i < rows; i++) {
                VecF weight = splat_f(score[i * positions]);
                UNROLL for (int v = 0; v < vecs; v++) {
                    sum[i][v] = mul_add(values[v * LANES + k], weight, sum[i][v]);
                }
            }
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int v = 0; v < vecs; v++) out[i * vectors + v] = sum[i][v];
    }
}

INLINE void attention_rows(const Pass *p, const AttRows *a, const int rows) {
    const int vectors = (int)a->width / LANES, end = a->len[a->n - 1];
    float total[ATT_TASK];
    for (int start = 0; start < end; start += 2 * LANES) {
        for (int r = 0; r < a->n; r += rows) {
            if (end - start > LANES) score_tile(p, a, r, start, rows, 2);
            else score_tile(p, a, r, start, rows, 1);
        }
    }
    for (int r = 0; r < a->n; r++) {
        float *score = a->score + r * a->positions;
        total[r] = softmax_terms(score, a->len[r]);
        for (int i = a->len[r]; i < end; i++) score[i] = 0;
    }
    memset(a->q, 0, a->n * a->width * sizeof(float));
    for (int start = 0; start < end; start += ATT_VALUES) {
        const int stop = min_int(end, start + ATT_VALUES);
        for (int r = 0; r < a->n; r += rows) {
            int j = 0;
            for (; j + 2 <= vectors; j += 2) value_tile(p, a, r, start, stop, j, rows, 2);
            if (j < vectors) value_tile(p, a, r, start, stop, j, rows, 1);
        }
    }
    for (int r = 0; r < a->n; r++) {
        const float inverse = 1 / total[r], *sum = a->q + r * a->width;
        for (int j = 0; j < p->m->config.head_dim; j++) a->place[r][j] = sum[j] * inverse;
    }
}

// Tasks of ATT_TASK rows, of one kv head after the other.
static int attention_tasks(const Pass *p) {
    int rows = (p->n - p->first) * (p->m->config.n_heads / p->m->config.n_kv_heads);
    return (rows + ATT_TASK - 1) / ATT_TASK;
}

// The rows of a kv head are numbered through its query heads, then through the tokens.
static void attention_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const Config *g = &p->m->config;
    const State *s = &p->m->state;
    const int group = g->n_heads / g->n_kv_heads, rows = (p->n - p->first) * group;
    AttRows a = {.width = value_dim(p->m), .positions = round_up(s->seq_len, 2 * LANES)};
    a.q = s->scratch[thread];
    a.score = a.q + ATT_TASK * a.width;
    for (int task = begin; task < end; task++) {
        int first = task % attention_tasks(p) * ATT_TASK, count = min_int(ATT_TASK, rows - first);
        a.kv_head = task / attention_tasks(p);
        a.n = count <= 2 ? 2 : round_up(count, ATT_ROWS);
        for (int r = 0; r < a.n; r++) {  // the last row stands in for rows behind it
            int i = min_int(first + r, rows - 1), t = p->first + i / group;
            int h = a.kv_head * group + i % group;
            a.place[r] = s->q + (size_t)t * g->q_dim + h * g->head_dim;
            a.len[r] = p->pos + t + 1;
            memcpy(a.q + r * a.width, a.place[r], g->head_dim * sizeof(float));
        }
        if (a.n == 2) attention_rows(p, &a, 2);
        else attention_rows(p, &a, ATT_ROWS);
    }
}

// x += delta; then xq = the quantized rmsnorm of x: the input of attention and of the feed-forward.
static void block_input(const Pass *p, int t) {
    const Config *g = &p->m->config;
    State *s = &p->m->state;
    float *x = s->x + (size_t)t * g->dim, *delta = s->delta + (size_t)t * g->dim;
    for (int i = 0; i < g->dim; i++) x[i] += delta[i];
    rmsnorm(delta, x, p->norm, g->dim, g->rms_norm_eps);
    quantize(&s->xq, t, 0, delta, g->dim, g->group_size);
}

static void attention_output(const Pass *p, int t) {
    const Config *g = &p->m->config;
    State *s = &p->m->state;
    quantize(&s->aq, t, 0, s->q + (size_t)t * g->q_dim, g->q_dim, g->group_size);
}

// silu(W1 h) * (W3 h), quantized, batch / n groups of its values at a time for all tokens, so
// that what they are made of never leaves the cache.
static void ffn_job(void *arg, int begin, int end, int thread) {
    const Pass *p = arg;
    const State *s = &p->m->state;
    const int group = p->m->config.group_size;
    for (int i = begin, groups; i < end; i += groups) {
        groups = min_int(end - i, s->batch / p->n);
        const int rows = groups * group;
        float *gate = s->part[thread], *up = gate + (size_t)p->n * rows;
        Linear l = {gate, rows, &p->layer->w1, i * group, i * group + rows, &s->xq, p->first, p->n,
                    s->scratch[thread]};
        linear(&l);
        l.w = &p->layer->w3;
        l.out = up;
        linear(&l);
        for (int t = p->first; t < p->n; t++) {
            float *h = gate + (size_t)t * rows;
            silu_times(h, up + (size_t)t * rows, rows);
            quantize(&s->hq, t, i * group, h, rows, group);
        }
    }
}

// Only the cache, which takes all tokens' keys and values, and tokens from first_needed on are of
// use later.
static void layer_forward(Pass *p, int first_needed) {
    const Config *g = &p->m->config;
    State *s = &p->m->state;
    const Layer *w = p->layer;
    p->norm = w->rms_att;
    each_token(p, block_input);
    p->first = first_needed;
    parallel(heads_job, p, g->n_heads + 2 * g->n_kv_heads, 1);
    if (p->first == p->n) return;
    parallel(attention_job, p, attention_tasks(p) * g->n_kv_heads, 1);
    each_token(p, attention_output);
    matmul(s, s->delta, &w->wo, &s->aq, p->first, p->n);
    p->norm = w->rms_ffn;
    each_token(p, block_input);
    parallel(ffn_job, p, g->hidden_dim / g->group_size, 1);
    matmul(s, s->delta, &w->w2, &s->hq, p->first, p->n);
}

// Starts token t: x is its row of the embedding, delta 0; and its rope angles.
static void embed(Model *m, int t, int token, int pos) {
    const Matrix *w = &m->weights.embedding;
    State *s = &m->state;
    const int dim = w->cols, half = m->config.head_dim / 2;
    const int8_t *q = w->q + (size_t)token * dim;
    const float *scale = w->scale + (size_t)token * (dim / w->group);
    for (int i = 0; i < dim; i++) s->x[(size_t)t * dim + i] = q[i] * scale[i / w->group];
    memset(s->delta + (size_t)t * dim, 0, dim * sizeof(float));
    for (int j = 0; j < half; j++) {
        float angle = (float)pos * s->freq[j];
        s->cos[(size_t)t * half + j] = cosf(angle) * s->rope_scale;
        s->sin[(size_t)t * half + j] = sinf(angle) * s->rope_scale;
    }
}

static struct {
    double start;
    size_t tokens, shown;  // of a text on its way through the model; as the terminal says, or 0
    size_t done, total;    // tokens by layers
    double drawn;          // seconds from the start
} progress;

static void progress_start(const Model *m, size_t tokens) {
    progress.start = now();
    progress.tokens = tokens;
    progress.done = 0;
    progress.drawn = 0;
    progress.total = tokens * m->config.n_layers;
}

// Nothing is left of it where an answer, a notice or an error begins.
static void progress_end(void) {
    if (progress.shown) fputs("\r\033[K", stderr);
    progress.shown = progress.total = 0;
}

// n tokens are through one more layer. A terminal shows it, ten times a second, if the text takes
// longer than two.
static void progress_add(int n) {
    progress.done += n;
    if (progress.total == 0 || quiet || !isatty(STDERR_FILENO)) return;
    size_t count = progress.tokens * progress.done / progress.total;
    double seconds = now() - progress.start;
    double left = seconds * (progress.total - progress.done) / progress.done;
    if (count == progress.shown || (!progress.shown && seconds + left < 2)) return;
    if (seconds < progress.drawn + 0.1) return;
    progress.shown = count;
    progress.drawn = seconds;
    fprintf(stderr, "\r%zu of %zu tokens, %.0f s left\033[K", count, progress.tokens, left);
}

// Runs n <= batch tokens at positions pos .. pos + n - 1, after which the cache holds these
// positions and x (n, dim) is the last layer's output for the last `needed` of them. False: Ctrl-C
// came first.
static bool forward(Model *m, const int *tokens, int n, int pos, int needed) {
    State *s = &m->state;
    s->passes++;
    for (int t = 0; t < n; t++) embed(m, t, tokens[t], pos + t);
    const int last = m->config.n_layers - 1;
    for (int l = 0; l <= last; l++) {
        if (interrupted) return false;
        Pass pass = {.m = m, .layer = &m->weights.layers[l], .l = l, .n = n, .pos = pos};
        layer_forward(&pass, l < last ? 0 : n - needed);
        progress_add(n);
    }
    for (size_t i = (size_t)(n - needed) * m->config.dim; i < (size_t)n * m->config.dim; i++) {
        s->x[i] += s->delta[i];
    }
    return true;
}

// logits (count, vocab_size) of tokens first .. first + count - 1 of the last forward pass.
static float *classify(Model *m, int first, int count) {
    const Config *g = &m->config;
    State *s = &m->state;
    for (int t = 0; t < count; t++) {
        const float *x = s->x + (size_t)(first + t) * g->dim;
        rmsnorm(s->delta, x, m->weights.rms_final, g->dim, g->rms_norm_eps);
        quantize(&s->xq, t, 0, s->delta, g->dim, g->group_size);
    }
    matmul(s, s->logits, &m->weights.classifier, &s->xq, 0, count);
    return s->logits;
}

// freq_j = theta^(-2j / head_dim). YaRN (arXiv 2309.00071; HF modeling_rope_utils): frequencies
// that turn less than beta_slow times in the original length are divided by the factor, those
// that turn more than beta_fast times stay, with a ramp over j between.
static void rope_init(State *s, const Config *g) {
    const float d = g->head_dim, theta = g->rope_theta;
    float low = 0, high = 0;
    s->rope_scale = g->rope_scaling ? g->yarn_attention_factor : 1;
    if (g->rope_scaling) {  // pair j turns beta times: j = d ln(L / (2 pi beta)) / (2 ln theta)
        float turns = g->yarn_original_len / 6.28318531f;
        low = d * logf(turns / g->yarn_beta_fast) / (2 * logf(theta));
        high = d * logf(turns / g->yarn_beta_slow) / (2 * logf(theta));
        if (!g->yarn_no_rounding) low = floorf(low), high = ceilf(high);
        low = fmaxf(low, 0);
        high = fminf(high, d - 1);
        if (low == high) high += 0.001f;
    }
    for (int j = 0; j < g->head_dim / 2; j++) {
        float freq = 1 / powf(theta, 2 * j / d);
        float ramp = g->rope_scaling ? fminf(fmaxf((j - low) / (high - low), 0), 1) : 0;
        s->freq[j] = ramp == 0 ? freq : freq / g->yarn_factor * ramp + freq * (1 - ramp);
    }
}

#define FOR_BATCH "the activations (-b makes them smaller)"

static Quantized quantized_init(size_t n, int cols, int group) {
    const size_t words = cols / 4, groups = cols / group;
    const size_t stride = (words + 2 * groups + 15) / 16 * 16;  // rows begin at 64 bytes
    int32_t *p = alloc((n + TILE_TOKENS) * stride, sizeof(*p), FOR_BATCH);
    return (Quantized){(int8_t *)p, (float *)p + words, p + words + groups, stride};
}

static void state_init(Model *m, int seq_len, int batch, int logit_rows) {
    const Config *g = &m->config;
    State *s = &m->state;
    const int hd = g->head_dim, blocks = (int)(((int64_t)seq_len + LANES - 1) / LANES);
    const int longest = max_int(max_int(g->dim, g->q_dim), g->hidden_dim);  // cols of a product
    const size_t b = batch;
    s->seq_len = seq_len;
    s->batch = batch;
    s->x = alloc(b * g->dim, sizeof(float), FOR_BATCH);
    s->delta = alloc(b * g->dim, sizeof(float), FOR_BATCH);
    s->q = alloc(b * g->q_dim, sizeof(float), FOR_BATCH);
    s->cos = alloc(b * hd / 2, sizeof(float), FOR_BATCH);
    s->sin = alloc(b * hd / 2, sizeof(float), FOR_BATCH);
    s->freq = alloc(hd / 2, sizeof(float), FOR_BATCH);
    s->xq = quantized_init(b, g->dim, g->group_size);
    s->aq = quantized_init(b, g->q_dim, g->group_size);
    s->hq = quantized_init(b, g->hidden_dim, g->group_size);
    s->logits = alloc((size_t)logit_rows * g->vocab_size, sizeof(float), FOR_BATCH);
    s->logit_rows = logit_rows;
    s->scratch = alloc(n_threads, sizeof(float *), FOR_BATCH);
    s->part = alloc(n_threads, sizeof(float *), FOR_BATCH);
    size_t attention = (size_t)ATT_TASK * (round_up(seq_len, 2 * LANES) + value_dim(m));
    size_t rows = (size_t)BLOCK * (longest / 4 + longest / g->group_size);
    for (int i = 0; i < n_threads; i++) {
        s->scratch[i] = alloc(attention > rows ? attention : rows, 4,
                              "attention (-c makes it smaller)");
        s->part[i] = alloc(b * max_int(hd, 2 * g->group_size), sizeof(float), FOR_BATCH);
    }
    s->kv_floats = (size_t)LANES * (hd + value_dim(m));
    s->kv = alloc((size_t)blocks * g->n_layers * g->n_kv_heads, s->kv_floats * sizeof(float),
                  "the KV cache (-c makes it smaller)");
#ifdef MADV_HUGEPAGE  // attention goes from block to block: far fewer pages to look up
    char *page = (char *)s->kv + (-(uintptr_t)s->kv & (sysconf(_SC_PAGESIZE) - 1));
    madvise(page, (size_t)blocks * g->n_layers * g->n_kv_heads * s->kv_floats * 4, MADV_HUGEPAGE);
#endif
    rope_init(s, g);
}

// ------------------------------------------------------------------------------------------------
// The tokenizer file: the tokens' bytes and scores, then the extension that export.py appends
// (README, "The files"): Unicode classes, NFC, added tokens, chat template, sampling defaults

// What a character is.
enum { OTHER, LETTER, NUMBER, SPACE, CLASS_MASK = 3, NFC_ACTIVE = 4, END = 8 };
enum { BAD_BYTE = 0x110000, N_CHARS = BAD_BYTE + 256 };  // a byte that is no UTF-8 is BAD_BYTE + it
enum { ADDED = 1, SPECIAL = 2 };  // a token that only stands for itself; that is not printed
enum { SYSTEM, USER, ASSISTANT };
typedef enum { CHAT, GENERATE, TOKENIZE, PERPLEXITY, EMBED, N_MODES } Mode;

typedef struct { uint64_t from, to; } Mapping;  // in tables sorted by `from`

typedef struct {  // the text around the messages of a conversation: see render()
    Bytes start, no_system;
    Bytes open[3], close[3];   // by role
    Bytes answer[2];           // where the answer begins: thinking off, thinking on
    Bytes strip, trim;         // what earlier answers lose
    bool system_opens_user;    // close[SYSTEM] holds open[USER]: older template files
} ChatFormat;

typedef struct {
    int vocab_size;
    Bytes *text;               // (vocab_size)
    float *score;              // (vocab_size) higher merges first
    uint8_t *kind;             // (vocab_size) ADDED, SPECIAL
    int byte_token[256];
    uint32_t *table;           // (mask + 1) id + 1 of every token but the added ones, or 0
    uint32_t mask;
    Ids added;                 // tokens that never come out of merging
    bool added_start[256];     // bytes that an added token begins with
    int end_of_text, think, end_think;  // ids, or -1
    Ids head, tail, stop;      // around every raw text; ends of an answer
    float temperature, top_p, repetition;  // the checkpoint's advice, see Sampler
    int top_k;
    Mode mode;                 // what the model is made for
    ChatFormat chat;
    bool has_chat, has_classes;
    uint16_t *chars;           // (N_CHARS) OTHER .. SPACE, NFC_ACTIVE, combining class << 8
    Mapping *parts;            // (n_parts) canonical decompositions: c to first << 32 | second
    Mapping *composed;         // (n_composed) and back, of those that NFC composes again
    size_t n_parts, n_composed;
} Tokenizer;

// Where the token with these bytes is in the table, or has its place.
static uint32_t *token_slot(const Tokenizer *t, Bytes b) {
    uint32_t hash = 2166136261u;  // FNV-1a
    for (size_t i = 0; i < b.n; i++) hash = (hash ^ b.p[i]) * 16777619u;
    uint32_t slot = (hash ^ hash >> 15) & t->mask;
    while (t->table[slot] && !bytes_equal(t->text[t->table[slot] - 1], b)) {
        slot = (slot + 1) & t->mask;
    }
    return &t->table[slot];
}

// The token with these bytes that is no added token, or -1.
static int token_find(const Tokenizer *t, Bytes b) { return (int)*token_slot(t, b) - 1; }

// The added token with this text, or -1.
static int added_find(const Tokenizer *t, const char *text) {
    for (size_t i = 0; i < t->added.n; i++) {
        if (bytes_equal(t->text[t->added.p[i]], bytes(text))) return t->added.p[i];
    }
    return -1;
}

static void added_insert(Tokenizer *t, int id, bool special) {
    ids_add(&t->added, id);
    t->kind[id] = special ? ADDED | SPECIAL : ADDED;
    t->added_start[t->text[id].p[0]] = true;
}

static int take_id(Cursor *c, const Tokenizer *t, const char *what) {
    uint32_t id = take_u32(c, what);
    if (id >= (uint32_t)t->vocab_size)
        die("%s: bad id in %s, expected less than %d, found %u", c->file, what, t->vocab_size, id);
    return (int)id;
}

static void take_ids(Cursor *c, const Tokenizer *t, const char *what, Ids *ids) {
    while (c->rest.n) ids_add(ids, take_id(c, t, what));
}

static void take_added(Cursor *c, Tokenizer *t, const char *what) {
    for (int id, last = -1; c->rest.n; last = id) {
        id = take_id(c, t, what);
        if (id <= last || t->text[id].n == 0)
            die("%s: bad token %d in %s, expected ascending ids with a text", c->file, id, what);
        added_insert(t, id, header_int(c, what, 0, 1));
    }
}

// Ascending ranges of characters, each with a value of 1 .. highest, at bit `shift` of chars.
static void take_ranges(Cursor *c, Tokenizer *t, const char *what, uint32_t highest, int shift) {
    for (uint32_t next = 0; c->rest.n;) {
        uint32_t first = take_u32(c, what), last = take_u32(c, what), value = take_u32(c, what);
        if (first < next || last < first || last >= BAD_BYTE || value < 1 || value > highest)
            die("%s: bad range in %s, expected ascending ones with 1 to %u, found %x to %x: %u",
                c->file, what, highest, first, last, value);
        for (next = first; next <= last; next++) {
            t->chars[next] |= value << shift | (shift ? NFC_ACTIVE : 0);
        }
    }
    t->has_classes |= shift == 0;
}

// second: 0 if c is but another way to write first
static void add_parts(Tokenizer *t, uint32_t c, uint32_t first, uint32_t second, bool composes) {
    uint64_t parts = (uint64_t)first << 32 | second;
    t->parts[t->n_parts++] = (Mapping){c, parts};
    if (composes) t->composed[t->n_composed++] = (Mapping){parts, c};
    t->chars[composes ? second : c] |= NFC_ACTIVE;
}

static int compare_u64(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// Canonical decompositions. Those of Hangul's syllables, a lead, a vowel and perhaps a tail, are
// not in the file: they follow from their numbers.
static void take_parts(Cursor *c, Tokenizer *t, const char *what) {
    enum { FIRST_SYLLABLE = 0xAC00, SYLLABLES = 19 * 21 * 28 };
    size_t most = c->rest.n / 16 + SYLLABLES;
    if (c->rest.n == 0) return;
    t->parts = alloc(most, sizeof(Mapping), "the tokenizer");
    t->composed = alloc(most, sizeof(Mapping), "the tokenizer");
    for (uint32_t next = 0; c->rest.n;) {
        uint32_t composed = take_u32(c, what), first = take_u32(c, what);
        uint32_t second = take_u32(c, what), composes = take_u32(c, what);
        if (composed < next || composed - FIRST_SYLLABLE < SYLLABLES || composed >= BAD_BYTE ||
            first >= BAD_BYTE || second >= BAD_BYTE || composes > 1)
            die("%s: bad record in section %s, found %x = %x + %x", c->file, what, composed, first,
                second);
        add_parts(t, composed, first, second, composes);
        next = composed + 1;
    }
    for (uint32_t i = 0; i < SYLLABLES; i++) {
        uint32_t syllable = FIRST_SYLLABLE + i, tail = i % 28;
        if (tail) add_parts(t, syllable, syllable - tail, 0x11A7 + tail, true);
        else add_parts(t, syllable, 0x1100 + i / 28 / 21, 0x1161 + i / 28 % 21, true);
    }
    qsort(t->parts, t->n_parts, sizeof(Mapping), compare_u64);
    qsort(t->composed, t->n_composed, sizeof(Mapping), compare_u64);
}

static void take_sampling(Cursor *c, Tokenizer *t) {
    t->temperature = header_float(c, "sampling temperature", 0, 1e6f, 0);
    t->top_p = header_float(c, "sampling top_p", 1e-45f, 1, 0);
    t->top_k = header_int(c, "sampling top_k", 0, INT_MAX);
}

static void take_chat(Cursor *c, Tokenizer *t, const char *what) {
    ChatFormat *f = &t->chat;
    Bytes *pieces[] = {&f->start, &f->no_system, &f->open[SYSTEM], &f->close[SYSTEM],
                       &f->open[USER], &f->close[USER], &f->open[ASSISTANT], &f->close[ASSISTANT],
                       &f->answer[0], &f->answer[1], &f->strip, &f->trim};
    for (size_t i = 0; i < sizeof(pieces) / sizeof(*pieces); i++) {
        pieces[i]->n = take_u32(c, what);
        pieces[i]->p = take(c, pieces[i]->n, what);
    }
    t->has_chat = true;
}

static void take_section(Cursor *c, Tokenizer *t, const char *tag) {
    if (!strcmp(tag, "adde")) take_added(c, t, tag);
    else if (!strcmp(tag, "clas")) take_ranges(c, t, tag, SPACE, 0);
    else if (!strcmp(tag, "ccc ")) take_ranges(c, t, tag, 255, 8);
    else if (!strcmp(tag, "deco")) take_parts(c, t, tag);
    else if (!strcmp(tag, "head")) take_ids(c, t, tag, &t->head);
    else if (!strcmp(tag, "tail")) take_ids(c, t, tag, &t->tail);
    else if (!strcmp(tag, "stop")) take_ids(c, t, tag, &t->stop);
    else if (!strcmp(tag, "samp")) take_sampling(c, t);
    else if (!strcmp(tag, "repe")) t->repetition = header_float(c, "penalty", 1e-6f, 1e12f, 0);
    else if (!strcmp(tag, "mode")) t->mode = header_int(c, "mode", 0, N_MODES - 1);
    else if (!strcmp(tag, "chat")) take_chat(c, t, tag);
    else die("%s: unknown section \"%s\"; was it made by a newer export.py?", c->file, tag);
    if (c->rest.n) die("%s: bad section %s, expected %zu bytes less", c->file, tag, c->rest.n);
}

static void take_extension(Cursor *c, Tokenizer *t) {
    if (memcmp(take(c, 4, "the extension"), "q3tx", 4) != 0)
        die("%s: wrong bytes after token %d, expected q3tx or the end; is it another model's?",
            c->file, t->vocab_size - 1);
    header_int(c, "extension version", 1, 1);
    uint32_t length = take_u32(c, "the extension");
    if (length != c->rest.n)
        die("%s: bad extension length, expected %zu, found %u", c->file, c->rest.n, length);
    static const char tags[] = "adde clas ccc  deco head tail stop samp repe mode chat ";
    uint64_t seen = 0;  // a bit for each place in tags
    while (c->rest.n) {
        char tag[5] = "";
        memcpy(tag, take(c, 4, "a section"), 4);
        const char *known = strstr(tags, tag);
        uint64_t bit = known ? (uint64_t)1 << (known - tags) : 0;
        if (seen & bit) die("%s: section %s is there twice", c->file, tag);
        size_t n = take_u32(c, tag);
        take_section(&(Cursor){c->file, {take(c, n, tag), n}}, t, tag);
        seen |= bit;
    }
}

// Without an extension only ASCII has its right classes: any other character counts as a letter.
static void default_classes(uint16_t *chars) {
    for (uint32_t c = 0; c < BAD_BYTE; c++) {
        bool letter = c >= 128 || isalpha(c);
        chars[c] |= letter ? LETTER : isspace(c) ? SPACE : isdigit(c) ? NUMBER : OTHER;
    }
}

static const float ADDED_SCORE = -1e6f;  // tokens that merges make have a higher one

// The tokens' records; a plain file may end before vocab_size, the rest has no text then.
static void take_tokens(Cursor *c, Tokenizer *t) {
    t->text = alloc(t->vocab_size, sizeof(Bytes), "the tokenizer");
    t->score = alloc(t->vocab_size, sizeof(float), "the tokenizer");
    t->kind = alloc(t->vocab_size, 1, "the tokenizer");
    for (int id = 0; id < t->vocab_size && c->rest.n; id++) {
        t->score[id] = take_f32(c, "a token's score");
        size_t n = take_u32(c, "a token's length");
        t->text[id] = (Bytes){take(c, n, "a token's text"), n};
        if (isnan(t->score[id])) die("%s: bad score of token %d, expected a number", c->file, id);
    }
}

static void index_tokens(Tokenizer *t, const char *file) {
    for (t->mask = 256; t->mask < 2 * (uint32_t)t->vocab_size;) t->mask *= 2;
    t->table = alloc(t->mask--, sizeof(*t->table), "the tokenizer");
    for (int id = 0; id < t->vocab_size; id++) {
        Bytes s = t->text[id];
        bool merges = s.n == 1 || (s.n > 1 && t->score[id] > ADDED_SCORE);
        if (!merges || t->kind[id] & ADDED) continue;
        uint32_t *slot = token_slot(t, s);
        if (*slot == 0) *slot = id + 1;
    }
    for (int i = 0; i < 256; i++) {
        t->byte_token[i] = token_find(t, (Bytes){(uint8_t[]){i}, 1});
        if (t->byte_token[i] < 0)
            die("%s: no token for byte 0x%02x, expected all 256; is it another model's?", file, i);
    }
}

// file: the model's name + ".tokenizer"
static void tokenizer_load(Tokenizer *t, const char *file, int vocab_size) {
    Cursor c = {file, file_map(file)};
    *t = (Tokenizer){.vocab_size = vocab_size, .temperature = 0.6f, .top_p = 0.95f, .top_k = 20,
                     .repetition = 1};
    t->chars = alloc(N_CHARS, sizeof(uint16_t), "the tokenizer");
    take_u32(&c, "max_token_length");  // some files count characters there
    int bos = take_id(&c, t, "the bos id"), eos = take_id(&c, t, "the eos id");
    take_tokens(&c, t);
    if (c.rest.n) take_extension(&c, t);
    if (!t->has_classes) default_classes(t->chars);
    for (int id = 0, listed = t->added.n > 0; id < vocab_size && !listed; id++) {
        Bytes s = t->text[id];
        bool special = s.n > 4 && !memcmp(s.p, "<|", 2) && !memcmp(s.p + s.n - 2, "|>", 2);
        if (t->score[id] <= ADDED_SCORE && s.n > 1) added_insert(t, id, special);
    }
    index_tokens(t, file);
    t->think = added_find(t, "<think>");
    t->end_think = added_find(t, "</think>");
    t->end_of_text = added_find(t, "<|endoftext|>");
    if (t->end_of_text < 0) t->end_of_text = bos;
    if (t->stop.n) return;
    ids_add(&t->stop, eos);
    ids_add(&t->stop, t->end_of_text);
    if (added_find(t, "<|im_end|>") >= 0) ids_add(&t->stop, added_find(t, "<|im_end|>"));
}

// ------------------------------------------------------------------------------------------------
// Text to tokens: cut at added tokens, NFC, cut by the regex, merge the bytes of each piece

typedef struct {
    uint32_t c;  // code point, or BAD_BYTE + byte
    int n;       // bytes, 0 at the end of the text
    int class;   // OTHER .. SPACE, or END
    bool active; // NFC_ACTIVE
} Char;

// The character at offset `at` (RFC 3629: no overlong forms, no surrogates).
INLINE Char char_at(const Tokenizer *t, Bytes s, size_t at) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (at >= s.n) return (Char){0, 0, END, false};
    const uint8_t *p = s.p + at;
    int n = p[0] < 0x80 ? 1 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    uint32_t c = n == 1 ? p[0] : p[0] & (0x7F >> n);
    bool bad = n > 1 && (p[0] < 0xC2 || p[0] > 0xF4 || s.n - at < (size_t)n);
    for (int i = 1; i < n && !bad; i++) {
        bad = (p[i] & 0xC0) != 0x80;
        c = c << 6 | (p[i] & 0x3F);
    }
    if (bad || c < least[n] || c >= BAD_BYTE || (c >= 0xD800 && c < 0xE000))
        c = BAD_BYTE + p[0], n = 1;
    return (Char){c, n, t->chars[c] & CLASS_MASK, t->chars[c] & NFC_ACTIVE};
}

static void add_char(Buffer *b, uint32_t c) {
    int n = c < 0x80 || c >= BAD_BYTE ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    uint8_t u[4] = {c >= BAD_BYTE ? c - BAD_BYTE : c};
    for (int i = n - 1; i > 0; i--, c >>= 6) u[i] = 0x80 | (c & 0x3F);
    if (n > 1) u[0] = 0xF0 << (4 - n) | c;
    buffer_add(b, (Bytes){u, n});
}

// ---- NFC (Unicode Standard Annex 15)

// A stretch of characters to be ordered: combining class << 56 | place << 24 | code point
typedef struct {
    uint64_t *p;
    size_t n, cap;
} Chars;

enum { CODE_POINT = 0xFFFFFF };

// What `from` maps to, or 0.
static uint64_t map_find(const Mapping *map, size_t n, uint64_t from) {
    const Mapping *m = bsearch(&from, map, n, sizeof(Mapping), compare_u64);
    return m ? m->to : 0;
}

// Appends the full canonical decomposition of c. Unicode's take 4 steps at most; a stranger's file
// could go on for ever.
static void decompose(const Tokenizer *t, Chars *out, uint32_t c, int steps) {
    uint64_t parts = map_find(t->parts, t->n_parts, c), class = t->chars[c] >> 8;
    if (steps > 8)
        die("tokenizer: bad section deco, expected one that ends, found U+%04X again", c);
    if (parts) {
        decompose(t, out, parts >> 32, steps + 1);
        if ((uint32_t)parts) decompose(t, out, (uint32_t)parts, steps + 1);
    } else {
        out->p = grow(out->p, &out->cap, out->n, 1, sizeof(uint64_t));
        out->p[out->n] = class << 56 | (uint64_t)out->n << 24 | c;
        out->n++;
    }
}

// Marks (class > 0) in order of their class, stable; then everything that composes with the last
// starter (class 0) before it, unless something between has the same class or a higher one.
static void order_and_compose(const Tokenizer *t, Chars *s) {
    for (size_t i = 0, end; i < s->n; i = end + 1) {
        for (end = i; end < s->n && s->p[end] >> 56; end++) {}
        qsort(s->p + i, end - i, sizeof(uint64_t), compare_u64);
    }
    uint64_t *end = s->p, *starter = NULL;
    int last = -1;  // class of the character before, -1: it is the starter
    for (size_t i = 0; i < s->n; i++) {
        int class = (int)(s->p[i] >> 56);
        uint64_t composed = 0, c = s->p[i] & CODE_POINT;
        if (starter && last < class)
            composed = map_find(t->composed, t->n_composed, (*starter & CODE_POINT) << 32 | c);
        if (composed) {
            *starter = composed;
            continue;
        }
        if (class == 0) starter = end;
        last = class == 0 ? -1 : class;
        *end++ = s->p[i];
    }
    s->n = end - s->p;
}

// Appends NFC(s). Only the characters marked NFC_ACTIVE, with the one before them, need work.
static void normalize(const Tokenizer *t, Buffer *out, Bytes s) {
    Chars chars = {0};
    size_t done = 0, before = 0;  // s.p[0 .. done) is in out; the last inactive character
    for (size_t at = 0; at < s.n;) {
        Char c = char_at(t, s, at);
        if (!c.active) {
            before = at;
            at += c.n;
            continue;
        }
        buffer_add(out, (Bytes){s.p + done, before - done});
        chars.n = 0;
        for (at = before; (c = char_at(t, s, at)).n && (at == before || c.active); at += c.n) {
            decompose(t, &chars, c.c, 0);
        }
        order_and_compose(t, &chars);
        for (size_t i = 0; i < chars.n; i++) add_char(out, chars.p[i] & CODE_POINT);
        done = before = at;
    }
    buffer_add(out, bytes_from(s, done));
    free(chars.p);
}

// ---- The pieces of a text

// The end of the run of characters of a class that begins at `at`.
static size_t run_end(const Tokenizer *t, Bytes s, size_t at, int class) {
    for (Char c; (c = char_at(t, s, at)).class == class;) at += c.n;
    return at;
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d): its bytes, or 0. Folding case adds U+017F to s.
static size_t contraction(Bytes s) {
    static const char *const all[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'\u017F"};
    for (int i = 0; s.n && s.p[0] == '\'' && i < 8; i++) {
        size_t n = strlen(all[i]);
        if (n <= s.n && strncasecmp((const char *)s.p, all[i], n) == 0) return n;
    }
    return 0;
}

INLINE bool is_newline(uint32_t c) { return c == '\n' || c == '\r'; }

// \s*[\r\n]+ up to the last newline; or \s+(?!\S), without the last character if something
// follows; or \s+
static size_t space_length(const Tokenizer *t, Bytes s) {
    size_t end = 0, last = 0, newline = 0;
    for (Char c; (c = char_at(t, s, end)).class == SPACE;) {
        last = end;
        end += c.n;
        if (is_newline(c.c)) newline = end;
    }
    if (newline) return newline;
    return end == s.n || last == 0 ? end : last;
}

// The length of the first piece of s (s.n > 0), by the alternatives of the regex in their order:
// (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\r\n\p{L}\p{N}]?\p{L}+ | \p{N} | ?[^\s\p{L}\p{N}]+[\r\n]*
// | \s*[\r\n]+ | \s+(?!\S) | \s+
static size_t piece_length(const Tokenizer *t, Bytes s) {
    size_t end = contraction(s);
    if (end) return end;
    Char a = char_at(t, s, 0), b = char_at(t, s, a.n);
    bool may_lead = a.class != NUMBER && !is_newline(a.c);
    if (a.class == LETTER || (may_lead && b.class == LETTER)) return run_end(t, s, a.n, LETTER);
    if (a.class == NUMBER) return a.n;
    if (a.class != OTHER && !(a.c == ' ' && b.class == OTHER)) return space_length(t, s);
    for (end = run_end(t, s, a.n, OTHER); end < s.n && is_newline(s.p[end]);) end++;
    return end;
}

// ---- Merging

// A piece is a ring of symbols, each known by the offset of its first byte; at the piece's end
// stands one that merges with none.
typedef struct {
    uint64_t key;         // of its merge with the next one: rank << 32 | offset, or NO_MERGE
    int id, merged;       // its token, and the one that the merge makes
    uint32_t prev, next;  // where its neighbours begin
} Symbol;

static const uint64_t NO_MERGE = UINT64_MAX;

typedef struct {  // text comes in parts, of which some may hold added tokens
    const Tokenizer *t;
    Ids *out;
    Buffer plain;     // text since the last added token: normalised and cut as one
    Buffer normal;    // its NFC
    Symbol *symbols;  // of a piece
    uint64_t *heap;   // keys of merges, the smallest at [0]
    size_t symbols_cap, n_heap, heap_cap;
} Encoder;

static void heap_push(Encoder *e, uint64_t key) {
    e->heap = grow(e->heap, &e->heap_cap, e->n_heap, 1, sizeof(*e->heap));
    size_t i = e->n_heap++;
    for (; i > 0 && key < e->heap[(i - 1) / 2]; i = (i - 1) / 2) e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = key;
}

static uint64_t heap_pop(Encoder *e) {
    uint64_t top = e->heap[0], moved = e->heap[--e->n_heap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < e->n_heap; i = child) {
        if (child + 1 < e->n_heap && e->heap[child + 1] < e->heap[child]) child++;
        if (moved <= e->heap[child]) break;
        e->heap[i] = e->heap[child];
    }
    e->heap[i] = moved;
    return top;
}

// A higher score is a smaller rank: the bits of floats are ordered as they are, sign aside.
INLINE uint32_t rank_of(float score) {
    float value = score + 0.0f;  // -0 is 0
    uint32_t bits = load_i32(&value);
    return bits >> 31 ? bits : INT_MAX - bits;
}

// Finds out whether the symbol at `at` and the one after it are a token together.
static void find_merge(Encoder *e, Bytes s, uint32_t at) {
    Symbol *a = &e->symbols[at];
    a->key = NO_MERGE;
    if (a->next >= s.n) return;
    a->merged = token_find(e->t, (Bytes){s.p + at, e->symbols[a->next].next - at});
    if (a->merged >= 0) a->key = (uint64_t)rank_of(e->t->score[a->merged]) << 32 | at;
}

// Only a merge that goes before those of both neighbours can be the next one: it alone need be in
// the heap, which stays small, so that a long run of one letter takes linear time.
static void offer(Encoder *e, uint32_t at) {
    const Symbol *a = &e->symbols[at];
    if (a->key < e->symbols[a->prev].key && a->key < e->symbols[a->next].key) heap_push(e, a->key);
}

// Byte-pair encoding of one piece: always the merge with the highest score, the leftmost of equals.
static void encode_piece(Encoder *e, Bytes s) {
    const uint32_t end = (uint32_t)s.n;
    e->symbols = grow(e->symbols, &e->symbols_cap, 0, s.n + 1, sizeof(Symbol));
    for (uint32_t i = 0; i < end; i++) {
        e->symbols[i] = (Symbol){NO_MERGE, e->t->byte_token[s.p[i]], -1, i ? i - 1 : end, i + 1};
    }
    e->symbols[end] = (Symbol){NO_MERGE, -1, -1, end, end};
    for (uint32_t i = 0; i < end; i++) find_merge(e, s, i);
    for (uint32_t i = 0; i < end; i++) offer(e, i);
    while (e->n_heap) {
        uint64_t key = heap_pop(e);
        uint32_t at = (uint32_t)key;
        Symbol *left = &e->symbols[at], *right = &e->symbols[left->next];
        if (left->key != key) continue;  // one of the two has merged with another
        right->key = NO_MERGE;
        left->id = left->merged;
        left->next = right->next;
        e->symbols[left->next].prev = at;
        find_merge(e, s, at);
        find_merge(e, s, left->prev);
        offer(e, e->symbols[left->prev].prev);
        offer(e, left->prev);
        offer(e, at);
        offer(e, left->next);
    }
    for (uint32_t i = 0; i < end; i = e->symbols[i].next) ids_add(e->out, e->symbols[i].id);
}

static void encode_end(Encoder *e) {
    Bytes s = {e->plain.p, e->plain.n};
    if (s.n >= INT_MAX) die("text: too long, expected less than 2 GB");
    if (e->t->n_parts) {
        e->normal.n = 0;
        normalize(e->t, &e->normal, s);
        s = (Bytes){e->normal.p, e->normal.n};
    }
    while (s.n) {
        size_t n = piece_length(e->t, s);
        encode_piece(e, (Bytes){s.p, n});
        s = bytes_from(s, n);
    }
    e->plain.n = 0;
}

static void encode_token(Encoder *e, int id) {
    encode_end(e);
    ids_add(e->out, id);
}

static void encode_plain(Encoder *e, Bytes s) { buffer_add(&e->plain, s); }

// The first added token in s at or behind *at, the longest if several begin there; -1: none, and
// *at is the end of s.
static int added_next(const Tokenizer *t, Bytes s, size_t *at) {
    for (; *at < s.n; ++*at) {
        int best = -1;
        for (size_t i = 0; t->added_start[s.p[*at]] && i < t->added.n; i++) {
            Bytes a = t->text[t->added.p[i]];
            bool there = a.n <= s.n - *at && memcmp(a.p, s.p + *at, a.n) == 0;
            if (there && (best < 0 || a.n > t->text[best].n)) best = t->added.p[i];
        }
        if (best >= 0) return best;
    }
    return -1;
}

// Text in which added tokens count as such.
static void encode_marked(Encoder *e, Bytes s) {
    size_t at = 0, plain = 0;
    for (int id; (id = added_next(e->t, s, &at)) >= 0; plain = at += e->t->text[id].n) {
        encode_plain(e, (Bytes){s.p + plain, at - plain});
        encode_token(e, id);
    }
    encode_plain(e, bytes_from(s, plain));
}

static void encoder_free(Encoder *e) {
    free(e->plain.p);
    free(e->normal.p);
    free(e->symbols);
    free(e->heap);
}

// A text of the raw modes, as HF's tokenizer(text): with added tokens, and with what its
// post-processor puts around every text.
static void encode_raw(const Tokenizer *t, Bytes s, Ids *out) {
    Encoder e = {.t = t, .out = out};
    for (size_t i = 0; i < t->head.n; i++) ids_add(out, t->head.p[i]);
    encode_marked(&e, s);
    encode_end(&e);
    for (size_t i = 0; i < t->tail.n; i++) ids_add(out, t->tail.p[i]);
    encoder_free(&e);
}

// ------------------------------------------------------------------------------------------------
// The chat format: a conversation is nothing but its messages, and each turn's prompt is all of
// them rendered and encoded anew, exactly as the checkpoint's template does it

typedef struct {
    int role;
    Buffer text;
    Ids ids;  // instead, if it is an answer: added tokens stay tokens, all else is plain text
} Message;

typedef struct {
    Message *p;
    size_t n, cap;
} Conversation;

static Message *conversation_add(Conversation *c, int role, Bytes text) {
    c->p = grow(c->p, &c->cap, c->n, 1, sizeof(Message));
    Message *m = &c->p[c->n++];
    *m = (Message){.role = role};
    buffer_add(&m->text, text);
    return m;
}

// Takes `count` messages away, beginning with the first-th.
static void conversation_drop(Conversation *c, size_t first, size_t count) {
    for (size_t i = first; i < first + count; i++) {
        free(c->p[i].text.p);
        free(c->p[i].ids.p);
    }
    memmove(c->p + first, c->p + first + count, (c->n - first - count) * sizeof(Message));
    c->n -= count;
}

// ChatML, as all Qwen models speak it; what a file without a template gets.
static ChatFormat chatml(void) {
    Bytes answer = bytes("<|im_start|>assistant\n"), end = bytes("<|im_end|>\n");
    Bytes system = bytes("<|im_start|>system\n"), user = bytes("<|im_start|>user\n");
    return (ChatFormat){.open = {system, user, answer}, .close = {end, end, end},
                        .answer = {answer, answer}, .strip = bytes("</think>"),
                        .trim = bytes("\n")};
}

// The offset behind the last `part` of s, 0: there is none.
static size_t find_last(Bytes s, Bytes part) {
    for (size_t end = s.n; part.n && end >= part.n; end--) {
        if (memcmp(s.p + end - part.n, part.p, part.n) == 0) return end;
    }
    return 0;
}

// An answer of an earlier turn, without its thinking.
static void encode_answer(Encoder *e, const ChatFormat *f, const Ids *ids) {
    Buffer all = {0};
    for (size_t i = 0; i < ids->n; i++) buffer_add(&all, e->t->text[ids->p[i]]);
    Bytes s = {all.p, all.n};
    size_t start = find_last(s, f->strip), at = 0;
    while (start && start < s.n && f->trim.n && memchr(f->trim.p, s.p[start], f->trim.n)) start++;
    for (size_t i = 0; i < ids->n; i++) {
        int id = ids->p[i];
        Bytes text = e->t->text[id];
        size_t cut = at < start ? start - at : 0;
        if (cut == 0 && e->t->kind[id] & ADDED) encode_token(e, id);
        else if (cut < text.n) encode_plain(e, bytes_from(text, cut));
        at += text.n;
    }
    free(all.p);
}

// The ids of a conversation, up to where the model's answer begins.
static void render(const Tokenizer *t, const Conversation *c, bool think, Ids *out) {
    const ChatFormat *f = &t->chat;
    Encoder e = {.t = t, .out = out};
    out->n = 0;
    encode_marked(&e, f->start);
    if (c->n == 0 || c->p[0].role != SYSTEM) encode_marked(&e, f->no_system);
    for (size_t i = 0; i < c->n; i++) {
        const Message *m = &c->p[i];
        bool opened = f->system_opens_user && i > 0 && c->p[i - 1].role == SYSTEM;
        if (!opened) encode_marked(&e, f->open[m->role]);
        if (m->role == ASSISTANT) encode_answer(&e, f, &m->ids);
        else encode_plain(&e, (Bytes){m->text.p, m->text.n});
        encode_marked(&e, f->close[m->role]);
    }
    encode_marked(&e, f->answer[think]);
    encode_end(&e);
    encoder_free(&e);
}

// The name of a file beside the model; false: there is none.
static bool beside(char path[4096], const char *model, const char *suffix) {
    return snprintf(path, 4096, "%s%s", model, suffix) < 4096 && access(path, F_OK) == 0;
}

// The parts of a template before, between and behind its `count` %s; false: there is no such file.
static bool template_parts(Bytes *parts, int count, const char *model, const char *suffix) {
    char path[4096];
    if (!beside(path, model, suffix)) return false;
    parts[0] = file_map(path);
    for (int i = count; i > 0; i--) {
        size_t end = find_last(parts[0], bytes("%s"));
        if (end == 0) die("%s: not a template, expected %%s where the texts go", path);
        parts[i] = bytes_from(parts[0], end);
        parts[0].n = end - 2;
    }
    return true;
}

// The four rendered prompts that older exports put beside the model: "A %s B" for a user's text,
// "S %s T %s B" for a system's and a user's. Each turn is A USER B ANSWER, end of turn, newline.
static bool chat_from_templates(Tokenizer *t, const char *model, bool think) {
    ChatFormat *f = &t->chat;
    const char *with_system =
        think ? ".template.with-system-and-thinking" : ".template.with-system";
    Bytes part[3];
    Buffer end = {0};
    if (!template_parts(part, 1, model, ".template")) return false;
    *f = (ChatFormat){.strip = bytes("</think>"), .trim = bytes("\n")};
    f->open[USER] = part[0];
    f->answer[0] = f->answer[1] = part[1];
    if (template_parts(part, 1, model, ".template.with-thinking")) f->answer[1] = part[1];
    buffer_add(&end, t->text[t->stop.p[0]]);
    buffer_add(&end, bytes("\n"));
    f->open[ASSISTANT] = f->answer[think];
    f->close[ASSISTANT] = (Bytes){end.p, end.n};
    if (template_parts(part, 2, model, with_system)) {
        f->open[SYSTEM] = part[0];
        f->close[SYSTEM] = part[1];
        f->system_opens_user = true;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// The sampler: repetition penalty, presence penalty, temperature, top-k, top-p, in HF's order.
// "First" and "before" go by probability, of equal tokens by the lower id. Nothing is sorted, and p
// is gone through in vectors: a flat distribution costs no more than any other.

typedef struct {
    float temperature;  // 0: the most likely token
    float top_p;        // keep the smallest set of tokens that reaches this probability
    float presence;     // taken off the logits of tokens that the answer already holds
    float repetition;   // makes tokens that prompt or answer hold less likely, 1: not
    int top_k;          // keep the k most likely, 0: all
    uint64_t rng;
    bool *answered;     // (vocab_size) tokens that the answer holds
    bool *seen;         // (vocab_size) tokens that prompt or answer hold
} Sampler;

// One of 2^53 numbers in [0, 1): splitmix64
static double random_next(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (double)((z ^ z >> 31) >> 11) / 9007199254740992.0;
}

// The sum of x (n): finite if all of them are. In 16 interleaved sums, like sum_of.
NOINLINE double total(const float *x, int n) {
    double sums[16] = {0}, sum = 0;
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        for (int j = 0; j < 16; j++) sums[j] += x[i + j];
    }
    for (; i < n; i++) sums[i % 16] += x[i];
    for (int j = 0; j < 16; j++) sum += sums[j];
    return sum;
}

#define NO_NUMBERS "model: the logits are no numbers; is the file damaged?"

static int argmax(const float *x, int n) {
    int best = 0;
    for (float max = max_of(x, n); x[best] != max && best < n - 1;) best++;
    return best;
}

// p = exp((logit - max) / temperature), (n)
NOINLINE void likelihoods(float *logits, int n, float max, float temperature) {
    for (int i = 0; i < n; i++) logits[i] = fast_exp((logits[i] - max) / temperature);
}

// Forgets all tokens but those before id.
NOINLINE void keep_before(float *p, int n, int id) {
    const int32_t bits = load_i32(p + id);
    for (int i = 0; i < id; i++) p[i] = load_i32(p + i) >= bits ? p[i] : 0;
    for (int i = id; i < n; i++) p[i] = load_i32(p + i) > bits ? p[i] : 0;
}

// Forgets all but the first k. Their bound is found by bisection of its bits, which order like the
// floats as none is negative.
NOINLINE void keep_top_k(float *p, int n, int k) {
    int32_t low = 0, high = INT32_MAX;  // `kept` >= k of p are at least `low`, less than k `high`
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
    for (int i = n - 1; kept > k; i--) {  // equal ones
        if (load_i32(p + i) != low) continue;
        p[i] = 0;
        kept--;
    }
}

// The lowest id with which the sum of p (n) exceeds `left`, or n.
static int token_at(const float *p, int n, double left) {
    enum { STEP = 1024 };
    int i = 0;
    for (double sum; i + STEP <= n && left >= (sum = total(p + i, STEP)); i += STEP) left -= sum;
    while (i < n && (left -= p[i]) >= 0) i++;
    return i;
}

// The repetition penalty (HF RepetitionPenaltyLogitsProcessor), then the presence penalty.
static void penalize(const Sampler *s, float *logits, int n) {
    for (int i = 0; i < n && s->repetition != 1; i++) {
        float lower = logits[i] < 0 ? logits[i] * s->repetition : logits[i] / s->repetition;
        if (s->seen[i]) logits[i] = lower;
    }
    for (int i = 0; i < n && s->presence != 0; i++) logits[i] -= s->answered[i] ? s->presence : 0;
}

// The next token by its logits (n), which are overwritten. Top-p: what is drawn stays if all before
// it have less than top_p of the sum. If not, the smallest set that reaches top_p is among those
// before it, and the next draw is from these alone.
static int sample(Sampler *s, float *logits, int n) {
    penalize(s, logits, n);
    if (!isfinite(total(logits, n))) die(NO_NUMBERS);
    if (s->temperature == 0) return argmax(logits, n);
    float *p = logits;
    likelihoods(p, n, max_of(logits, n), s->temperature);
    if (s->top_k > 0 && s->top_k < n) keep_top_k(p, n, s->top_k);
    double sum = total(p, n), enough = s->top_p * sum;
    for (;;) {
        int id = token_at(p, n, random_next(&s->rng) * sum);
        if (id == n) continue;  // by rounding
        keep_before(p, n, id);
        sum = total(p, n);
        if (sum < enough) return id;
    }
}

// ------------------------------------------------------------------------------------------------
// Writing an answer: the tokens' bytes as they come, parts of a character only when it ends

typedef struct {
    bool chat;      // thinking is set apart
    bool terminal;  // stdout is one
    bool dim;       // thinking is dimmed there
    bool thinking;
    bool trim;      // no newlines between thinking and answer on a stdout that is no terminal
    Buffer held;
} Writer;

// Ctrl-C ends an answer, or a conversation that waits for a message; a second one the program.
static void on_interrupt(int signal) {
    (void)signal;
    if (interrupted || !stoppable) {
        restore_terminal();
        _exit(EXIT_INTERRUPT);
    }
    interrupted = 1;
}

// SIGTERM; and SIGBUS: a mapped file has become shorter, or its disk fails.
static void on_end(int signal) {
    static const char lost[] = "qwen3: model: can't be read any more, expected its files to stay "
                               "as they are, found them cut or their disk failing\n";
    static atomic_flag said = ATOMIC_FLAG_INIT;
    restore_terminal();
    if (signal == SIGBUS) {
        while (atomic_flag_test_and_set(&said)) cpu_pause();  // another thread says it, and ends
        (void)!write(STDERR_FILENO, lost, sizeof(lost) - 1);
        _exit(EXIT_FAILURE);
    }
    raise(signal);  // ends the program, as this was reset by SA_RESETHAND
}

// All of s goes out at once, whatever signals come.
static void write_stdout(Bytes s) {
    while (s.n) {
        ssize_t n = write(STDOUT_FILENO, s.p, s.n);
        if (n < 0 && errno == EPIPE) exit(EXIT_SUCCESS);  // the reader has seen enough
        if (n < 0 && errno != EINTR) die("stdout: %s", strerror(errno));
        if (n > 0) s = bytes_from(s, n);
    }
}

// How many bytes at the end of s are an unfinished character that can still become one.
static size_t unfinished(Bytes s) {
    for (size_t n = 1; n <= 3 && n <= s.n; n++) {
        const uint8_t *p = s.p + s.n - n;
        if ((p[0] & 0xC0) == 0x80) continue;
        size_t needs = p[0] >= 0xF0 ? 4 : p[0] >= 0xE0 ? 3 : 2;
        if (p[0] < 0xC2 || p[0] > 0xF4 || n >= needs) return 0;
        uint8_t low = p[0] == 0xE0 ? 0xA0 : p[0] == 0xF0 ? 0x90 : 0x80;
        uint8_t high = p[0] == 0xED ? 0x9F : p[0] == 0xF4 ? 0x8F : 0xBF;
        return n == 1 || (p[1] >= low && p[1] <= high) ? n : 0;
    }
    return 0;
}

// Writes what is held, but for the last `keep` bytes.
static void writer_flush(Writer *w, size_t keep) {
    Bytes s = {w->held.p, w->held.n - keep};
    if (w->trim) {
        while (s.n && *s.p == '\n') s = bytes_from(s, 1);
        if (s.n) w->trim = false;
    }
    bool aside = w->chat && w->thinking && !w->terminal;
    if (!aside) write_stdout(s);
    else if (!quiet) fwrite(s.p, 1, s.n, stderr);
    if (keep) memmove(w->held.p, w->held.p + w->held.n - keep, keep);
    w->held.n = keep;
}

static void writer_thinks(Writer *w, bool thinking) {
    if (!w->chat || w->thinking == thinking) return;
    writer_flush(w, 0);
    if (w->dim) {
        dimmed = thinking;
        write_stdout(bytes(thinking ? "\033[2m" : "\033[0m"));
    }
    if (!thinking && !w->terminal) {
        if (!quiet) fputc('\n', stderr);
        w->trim = true;
    }
    w->thinking = thinking;
}

static void writer_token(Writer *w, const Tokenizer *t, int id) {
    if (id == t->think) writer_thinks(w, true);
    if (!(t->kind[id] & SPECIAL)) {
        buffer_add(&w->held, t->text[id]);
        writer_flush(w, unfinished((Bytes){w->held.p, w->held.n}));
    }
    if (id == t->end_think) writer_thinks(w, false);
}

static void writer_end(Writer *w) {
    writer_flush(w, 0);
    writer_thinks(w, false);
    w->trim = false;
    if (w->chat || w->terminal) write_stdout(bytes("\n"));
}

// ------------------------------------------------------------------------------------------------
// Generation: one loop for chat and for raw text

typedef enum { TURN_ENDED, LIMIT_REACHED, CONTEXT_FULL, INTERRUPTED } Ending;

static const char *const mode_names[] = {"chat", "generate", "tokenize", "perplexity", "embed"};

typedef struct {
    const char *model, *text, *file, *system;  // NULL: not given
    int mode;                                  // -1: not given
    int think;                                 // -1: not given
    float temperature, top_p, presence;        // -1: the checkpoint's; presence 0
    int top_k, n, context, batch, threads;     // -1: not given
    uint64_t seed;
    bool verbose;
} Options;

typedef struct {
    Options options;
    Model model;
    Tokenizer tokenizer;
    Sampler sampler;
    Writer writer;
    Mode mode;        // -m, or what the model is made for
    Conversation conversation;
    Buffer input;     // the prompt, or the message being typed
    char *line;       // getline()'s
    size_t line_cap;
    Ids cached;       // what the KV cache holds; behind that the answer's last id, and a draft
    size_t reused;    // how much of the prompt it held already
    int credit;       // what drafts may cost: see draft()
    bool think;       // -r 1
    bool no_switch;   // -r was given to one that can't
    bool noticed;     // the notices are out
} Engine;

// Does the prompt itself open the thinking?
static bool begins_thinking(const Engine *e) {
    Bytes answer = e->tokenizer.chat.answer[e->think];
    return find_last(answer, bytes("<think>")) > find_last(answer, bytes("</think>"));
}

// Notices come once nothing can go wrong any more: an error stands alone.
static void give_notices(Engine *e) {
    if (e->noticed) return;
    e->noticed = true;
    if (!e->tokenizer.has_classes)
        notice("%s.tokenizer: no Unicode data, exact on ASCII text only; export the model again",
               e->options.model);
    if (e->options.mode < 0 && e->mode != CHAT)
        notice("mode: %s, this is no chat model; -m chat talks to it anyway", mode_names[e->mode]);
    if (e->no_switch) notice("-r: no effect, this model's thinking can't be switched");
    if (e->writer.chat && e->sampler.temperature == 0 && (e->think || begins_thinking(e)))
        notice("-t 0: greedy thinking tends to repeat itself without end, Qwen advises 0.6");
}

#define PROMPT_TOO_LONG "prompt: too long, expected at most %d tokens (-c), found %zu"

// Runs what the cache does not hold yet of a prompt, at least its last token. Returns that token's
// row in the last forward pass, or -1 after Ctrl-C.
static int prefill(Engine *e, const Ids *ids) {
    const State *s = &e->model.state;
    Ids *cached = &e->cached;
    Buffer *held = &e->writer.held;
    size_t same = 0;
    int n = 0;
    if (ids->n > (size_t)s->seq_len) die(PROMPT_TOO_LONG, s->seq_len, ids->n);
    if (ids->n == 0) die("prompt: empty, expected at least one token");
    give_notices(e);
    if (e->options.verbose) {
        fputs("prompt ids:", stderr);
        for (size_t i = 0; i < ids->n; i++) fprintf(stderr, " %d", ids->p[i]);
        fputc('\n', stderr);
    }
    while (same < cached->n && same + 1 < ids->n && cached->p[same] == ids->p[same]) same++;
    e->reused = same;
    e->credit += (int)(ids->n - same) / 16;  // they take about as long as so many tokens: draft()
    // room for the whole answer, and for a token's text: decoding allocates nothing
    cached->p = grow(cached->p, &cached->cap, 0, s->seq_len + 1, sizeof(int));
    held->p = grow(held->p, &held->cap, 0, 1024, 1);
    memcpy(cached->p, ids->p, ids->n * sizeof(int));
    progress_start(&e->model, ids->n - same);
    bool running = true;
    for (cached->n = same; running && cached->n < ids->n; cached->n += running ? n : 0) {
        n = min_int(s->batch, (int)(ids->n - cached->n));
        const bool last = cached->n + n == ids->n;
        running = forward(&e->model, ids->p + cached->n, n, (int)cached->n, last);
    }
    progress_end();
    return running ? n - 1 : -1;
}

static bool is_stop(const Tokenizer *t, int id) {
    for (size_t i = 0; i < t->stop.n; i++) {
        if (t->stop.p[i] == id) return true;
    }
    return false;
}

// Prompt lookup decoding (Saxena 2023): an answer often repeats what the context holds, code that
// it changes, text that it quotes. Where its last NGRAM ids stood before, the ids that followed are
// a draft of the next ones, and one forward pass runs them all: it reads the weights only once.
// generate() then samples row by row, as if each had been a pass of its own, up to the first id
// that is not the draft's; what the cache holds behind that is overwritten. A batch gives the same
// bits as single tokens, and no random number is drawn for rows behind that id: the output is the
// same, not only its distribution (speculative decoding, Leviathan et al., arXiv 2211.17192).
//
// A draft fills one tile of matmul, or two after a draft that was right to its end. A tile costs
// about as much as a decoded token, at most, and each right id saves one. credit counts this, in
// 1 / DRAFT_COST tokens; single steps earn 1, so that wrong drafts take about 2 % of the time.
enum { NGRAM = 5, DRAFT_COST = 50, DRAFT_ROWS = HAVE_DOT4 ? 2 * TILE_TOKENS : 1 };

// Writes `most` ids behind the first n, those that followed the last NGRAM of them where these last
// stood before. If that was less than `most` ids ago, the draft goes on with its own first ids: a
// loop goes on. Returns how many: 0 if they did not stand before.
static int lookup(int *ids, size_t n, int most) {
    for (size_t from = n - 1; most > 0 && from >= NGRAM; from--) {
        if (memcmp(ids + from - NGRAM, ids + n - NGRAM, NGRAM * sizeof(int)) != 0) continue;
        for (int i = 0; i < most; i++) ids[n + i] = ids[from + i];
        return most;
    }
    return 0;
}

// Drafts what follows the answer's `count` ids, the last of which is the first behind the cached
// ones. Returns how many ids, for which the cache, the logits and -n have room.
static int draft(Engine *e, int count, bool was_right) {
    const State *s = &e->model.state;
    int rows = min_int(was_right ? DRAFT_ROWS : TILE_TOKENS, s->logit_rows);
    rows = min_int(rows, s->seq_len - (int)e->cached.n);
    if (e->options.n >= 0) rows = min_int(rows, e->options.n - count);
    e->credit = min_int(e->credit + 1, 8 * DRAFT_COST);
    if (count < NGRAM || e->credit < DRAFT_COST) return 0;
    int drafted = lookup(e->cached.p, e->cached.n + 1, rows - 1);
    if (drafted) e->credit -= DRAFT_COST * (drafted / TILE_TOKENS + 1);
    return drafted;
}

// Writes the continuation of a cached prompt, at most options.n tokens, and counts them: they stand
// in e->cached behind the prompt. row: the prompt's last in the last forward pass
static Ending generate(Engine *e, int row, int *count) {
    Model *m = &e->model;
    Ids *ids = &e->cached;
    int vocab_size = e->tokenizer.vocab_size, drafted = 0;
    memset(e->sampler.answered, 0, vocab_size * sizeof(bool));
    memset(e->sampler.seen, 0, vocab_size * sizeof(bool));
    for (size_t i = 0; i < ids->n; i++) e->sampler.seen[ids->p[i]] = true;
    float *logits = classify(m, row, 1);
    for (row = *count = 0; e->options.n != *count; row++) {
        if (interrupted) return INTERRUPTED;
        int id = sample(&e->sampler, logits + (size_t)row * vocab_size, vocab_size);
        if (is_stop(&e->tokenizer, id)) return TURN_ENDED;
        const bool was_run = row < drafted && ids->p[ids->n] == id;
        ids->p[ids->n] = id;
        ++*count;
        e->sampler.answered[id] = e->sampler.seen[id] = true;
        writer_token(&e->writer, &e->tokenizer, id);
        if (*count == e->options.n) break;
        if (ids->n == (size_t)m->state.seq_len) return CONTEXT_FULL;
        if (was_run) {
            e->credit += DRAFT_COST;
        } else {
            drafted = draft(e, *count, drafted && row == drafted);
            int n = 1 + drafted;
            if (!forward(m, ids->p + ids->n, n, (int)ids->n, n)) return INTERRUPTED;
            logits = classify(m, 0, n);
            row = -1;
        }
        ids->n++;
    }
    return LIMIT_REACHED;
}

// Runs a prompt and writes its answer, which is added to `answer` (or NULL), with everything that
// is said about them on stderr.
static Ending respond(Engine *e, const Ids *ids, Ids *answer) {
    int count = 0;
    double start = now();
    int row = prefill(e, ids);
    double middle = now();
    const size_t prompt = e->cached.n - e->reused;  // less than there is if Ctrl-C came
    Ending ending = row < 0 ? INTERRUPTED : generate(e, row, &count);
    double end = now();
    for (int i = 0; answer && i < count; i++) ids_add(answer, e->cached.p[ids->n + i]);
    bool thinking = e->writer.thinking;
    writer_end(&e->writer);
    if (ending == CONTEXT_FULL)
        notice("answer: stopped, the context of %d tokens is full (-c)", e->model.state.seq_len);
    if (thinking && (ending == CONTEXT_FULL || ending == LIMIT_REACHED))
        notice("answer: ended inside its thinking after %d tokens (-n, -c)", count);
    if (!quiet) {
        fprintf(stderr, "prompt %zu tokens (%zu cached) %.1f tok/s, ", ids->n, e->reused,
                prompt / (middle - start + 1e-9));
        fprintf(stderr, "generated %d tokens %.1f tok/s, seed %llu\n", count,
                count / (end - middle + 1e-9), (unsigned long long)e->options.seed);
    }
    return ending;
}

// ------------------------------------------------------------------------------------------------
// The modes

static void run_tokenize(Engine *e, const Ids *ids) {
    Buffer line = {0};
    give_notices(e);
    buffer_add_ids(&line, ids);
    write_stdout((Bytes){line.p, line.n});
    free(line.p);
}

// -log of the probability of `id` by its logits (n), which are overwritten
static double surprise(float *logits, int n, int id) {
    float max = max_of(logits, n), logit = logits[id];
    likelihoods(logits, n, max, 1);
    return log(total(logits, n)) + max - logit;
}

// Runs ids 0 .. n - 1 at positions pos and on, returns the sum of the surprises of ids 1 .. n.
static double score(Engine *e, const int *ids, int n, int pos) {
    const int rows = e->model.state.logit_rows, vocab_size = e->tokenizer.vocab_size;
    float *logits = NULL;
    double sum = 0;
    if (!forward(&e->model, ids, n, pos, n)) progress_end(), exit(EXIT_INTERRUPT);
    for (int i = 0; i < n; i++) {
        if (i % rows == 0) logits = classify(&e->model, i, min_int(rows, n - i));
        sum += surprise(logits + (size_t)(i % rows) * vocab_size, vocab_size, ids[i + 1]);
    }
    return sum;
}

// A text longer than the context is scored in pieces, each of which begins with the last token of
// the one before.
static void run_perplexity(Engine *e, const Ids *ids) {
    const int context = e->model.state.seq_len, batch = e->model.state.batch;
    if (ids->n < 2) die("text: too short for a perplexity, expected 2 tokens, found %zu", ids->n);
    if (context < 2) die("context: too short for a perplexity, expected -c 2, found %d", context);
    give_notices(e);
    if (ids->n > (size_t)context)
        notice("text: %zu tokens are scored in pieces of %d (-c)", ids->n, context);
    const int n = (int)ids->n - 1;
    double sum = 0;
    progress_start(&e->model, n);
    for (int at = 0, count; at < n; at += count) {
        int pos = at % (context - 1);
        count = min_int(min_int(batch, context - 1 - pos), n - at);
        sum += score(e, ids->p + at, count, pos);
    }
    progress_end();
    double mean = sum / n;
    if (!isfinite(mean)) die(NO_NUMBERS);
    char line[128];
    snprintf(line, sizeof(line), "tokens %d nll %.6f ppl %.4f\n", n, mean, exp(mean));
    write_stdout(bytes(line));
}

// The last token's hidden state (dim) after the final norm, divided by its length: a JSON array.
static void run_embed(Engine *e, const Ids *ids) {
    const Config *g = &e->model.config;
    State *s = &e->model.state;
    if (ids->n == 0) die("text: nothing to embed, expected at least 1 token, found 0");
    int row = prefill(e, ids);
    if (row < 0) exit(EXIT_INTERRUPT);
    float *x = s->delta;
    rmsnorm(x, s->x + (size_t)row * g->dim, e->model.weights.rms_final, g->dim, g->rms_norm_eps);
    double squares = 0;
    for (int i = 0; i < g->dim; i++) squares += (double)x[i] * x[i];
    if (!isfinite(squares)) die("model: the vector is no numbers; is the file damaged?");
    double length = fmax(sqrt(squares), 1e-12);
    Buffer line = {0};
    char number[32];
    for (int i = 0; i < g->dim; i++) {
        snprintf(number, sizeof(number), "%s%.9g", i ? ", " : "[", x[i] / length);
        buffer_add(&line, bytes(number));
    }
    buffer_add(&line, bytes("]\n"));
    write_stdout((Bytes){line.p, line.n});
    free(line.p);
}

// Every mode but chat: a text as it is
static Ending run_raw(Engine *e, Bytes text) {
    Ending ending = TURN_ENDED;
    Ids ids = {0};
    encode_raw(&e->tokenizer, text, &ids);
    if (e->mode == GENERATE && ids.n == 0) ids_add(&ids, e->tokenizer.end_of_text);
    if (e->mode == GENERATE) ending = respond(e, &ids, NULL);
    else if (e->mode == TOKENIZE) run_tokenize(e, &ids);
    else if (e->mode == PERPLEXITY) run_perplexity(e, &ids);
    else run_embed(e, &ids);
    free(ids.p);
    return ending;
}

// Renders the conversation. If there is no room for an answer, the oldest turns go until half the
// context is free. False: the last message alone is too long.
static bool fit_conversation(Engine *e, Ids *ids) {
    Conversation *c = &e->conversation;
    const size_t context = e->model.state.seq_len, first = c->p[0].role == SYSTEM;
    size_t room = context / 4, dropped = 0;
    if (e->options.n >= 0 && (size_t)e->options.n < room) room = e->options.n;
    render(&e->tokenizer, c, e->think, ids);
    if (ids->n + room <= context) return true;
    Message alone[] = {c->p[0], c->p[c->n - 1]};  // what must stay
    render(&e->tokenizer, &(Conversation){alone + !first, 1 + first, 0}, e->think, ids);
    if (ids->n > context) return false;
    render(&e->tokenizer, c, e->think, ids);
    for (; c->n - first > 1 && ids->n > context / 2; dropped++) {
        conversation_drop(c, first, 2);
        render(&e->tokenizer, c, e->think, ids);
    }
    if (dropped)
        notice("context: no room in %zu tokens (-c), forgotten turns: %zu", context, dropped);
    return true;
}

// A user's message and the model's answer to it.
static Ending chat_turn(Engine *e, Bytes text, bool leave_on_error) {
    Conversation *c = &e->conversation;
    Ids ids = {0};
    conversation_add(c, USER, text);
    if (!fit_conversation(e, &ids)) {
        report(PROMPT_TOO_LONG, e->model.state.seq_len, ids.n);
        if (leave_on_error) exit(EXIT_FAILURE);
        conversation_drop(c, c->n - 1, 1);
        free(ids.p);
        return CONTEXT_FULL;
    }
    writer_thinks(&e->writer, begins_thinking(e));
    Message *answer = conversation_add(c, ASSISTANT, (Bytes){0});
    Ending ending = respond(e, &ids, &answer->ids);
    if (ending == INTERRUPTED && answer->ids.n == 0) {
        if (!leave_on_error) notice("chat: stopped before its answer, the message is taken back");
        conversation_drop(c, c->n - 2, 2);
    }
    free(ids.p);
    return ending;
}

// Without its final newline, \n or \r\n.
static Bytes chop(Bytes s) {
    if (s.n && s.p[s.n - 1] == '\n' && --s.n && s.p[s.n - 1] == '\r') s.n--;
    return s;
}

enum { TERMINAL_LINE = 4095 };  // a terminal takes no more bytes in a line

// The next line of stdin; false at the end of input or after Ctrl-C.
static bool read_line(Engine *e, Bytes *text) {
    errno = 0;
    ssize_t n = interrupted ? -1 : getline(&e->line, &e->line_cap, stdin);
    if (n < 0 && (errno == ENOMEM || ferror(stdin)) && errno != EINTR)
        die("stdin: %s", strerror(errno));
    *text = (Bytes){(uint8_t *)e->line, n > 0 ? n : 0};
    return n > 0;
}

// A message typed or pasted at a terminal; false at the end of input or after Ctrl-C.
static bool read_message(Engine *e) {
    Buffer *message = &e->input;
    Bytes text;
    bool more = true, cut = false;
    if (!quiet) fputs("> ", stderr);
    for (message->n = 0; more;) {
        if (!read_line(e, &text)) {
            if (interrupted || message->n == 0) return false;
            break;
        }
        cut |= chop(text).n >= TERMINAL_LINE;
        buffer_add(message, text);
        more = message->n > 1 && memcmp(message->p + message->n - 2, "\\\n", 2) == 0;
        if (more) message->p[--message->n - 1] = '\n';
        else more = text.p[text.n - 1] == '\n' && input_waits();
    }
    message->n = cut ? 0 : chop((Bytes){message->p, message->n}).n;
    if (cut)
        notice("input: the terminal cut a line at %d bytes, nothing was sent; -f FILE takes longer "
               "ones", TERMINAL_LINE);
    return true;
}

// A conversation with stdin: a terminal, or a script of one turn a line.
static int run_conversation(Engine *e) {
    Bytes text;
    if (!isatty(STDIN_FILENO)) {
        while (interrupted = 0, read_line(e, &text)) chat_turn(e, chop(text), true);
        return interrupted ? EXIT_INTERRUPT : EXIT_SUCCESS;
    }
    setvbuf(stdin, NULL, _IONBF, 0);  // what waits, waits in the terminal: input_waits()
    give_notices(e);
    notice("chat: a line ending in \\ goes on in the next, a pasted block is one message; "
           "Ctrl-C stops an answer, Ctrl-D leaves");
    while (interrupted = 0, read_message(e)) {
        if (e->input.n) chat_turn(e, (Bytes){e->input.p, e->input.n}, false);
    }
    if (!quiet) fputc('\n', stderr);
    return interrupted ? EXIT_INTERRUPT : EXIT_SUCCESS;
}

// ------------------------------------------------------------------------------------------------
// Options and main

static const char usage[] =
    "qwen3 " VERSION " (" SIMD "): runs Qwen3 language models\n"
    "\n"
    "usage: qwen3 MODEL [options]      MODEL is a .bin file made by export.py\n"
    "\n"
    "  -i TEXT    the prompt; without -i and -f a terminal chats, a pipe is read as the prompt\n"
    "  -f FILE    the prompt is FILE's text (- is stdin); with -i: TEXT, empty line, FILE's text\n"
    "  -m MODE    chat, generate (raw completion), embed, tokenize or perplexity [what the model\n"
    "             is made for: mostly chat]\n"
    "  -y TEXT    system prompt (chat) [none]\n"
    "  -r 0|1     thinking off or on, for models that can switch (chat) [0]\n"
    "  -t FLOAT   temperature, 0 is greedy [the checkpoint's; 0.7 with thinking switched off]\n"
    "  -p FLOAT   top-p, above 0 and up to 1 [the checkpoint's; 0.8 with thinking switched off]\n"
    "  -k INT     top-k, 0 is off [the checkpoint's; 20 with thinking switched off]\n"
    "  -a FLOAT   presence penalty on tokens already generated, 0 to 2 [0]\n"
    "  -s INT     random seed, 64 bits [from the clock]\n"
    "  -n INT     at most so many new tokens per answer [to the end of the turn or the context]\n"
    "  -c INT     context length in tokens, 0 is the model's [4096, or the model's if smaller]\n"
    "  -b INT     prompt tokens per forward pass, 1 to 512; never changes the output [512]\n"
    "  -j INT     threads; never changes the output [all cores this process may use]\n"
    "  -q         nothing on stderr but errors\n"
    "  -v         also the prompt's ids on stderr\n"
    "  -h, --version\n"
    "\n"
    "-m chat on a pipe is a conversation, one turn a line. The model's text goes to stdout, all\n"
    "else to stderr. Exit: 0 success, 1 file, memory or model error, 2 usage error, 130 Ctrl-C.\n";

static float parse_float(const char *option, const char *s, float low, float high) {
    char *end;
    float value = strtof(s, &end);
    if (end == s || *end || !(value >= low && value <= high))
        die_usage("%s: bad value, expected %g to %g, found \"%s\"", option, low, high, s);
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
    case 'n': o->n = parse_int(option, value, 0, INT_MAX); break;
    case 'c': o->context = parse_int(option, value, 0, INT_MAX); break;
    case 'b': o->batch = parse_int(option, value, 1, 512); break;
    case 'j': o->threads = parse_int(option, value, 1, 1024); break;
    case 's': o->seed = parse_seed(value); break;
    }
}

// Only chat and generate can begin without a text.
static void check_text(const Options *o, int mode) {
    if (mode > GENERATE && !o->text && !o->file && isatty(STDIN_FILENO))
        die_usage("-m %s: no text, expected -i TEXT, -f FILE or a pipe", mode_names[mode]);
}

static Options parse_options(int argc, char **argv) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    Options o = {.mode = -1, .think = -1, .temperature = -1, .top_p = -1, .top_k = -1, .n = -1,
                 .context = -1, .batch = 512, .threads = -1,
                 .seed = (uint64_t)time.tv_sec * 1000000000u + time.tv_nsec};
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (!strcmp(arg, "-h") || !strcmp(arg, "--help")) {
            write_stdout(bytes(usage));
            exit(EXIT_SUCCESS);
        } else if (!strcmp(arg, "--version")) {
            write_stdout(bytes("qwen3 " VERSION " (" SIMD ")\n"));
            exit(EXIT_SUCCESS);
        } else if (!strcmp(arg, "-q")) {
            quiet = true;
        } else if (!strcmp(arg, "-v")) {
            o.verbose = true;
        } else if (arg[0] == '-' && arg[1] && !arg[2] && strchr("ifmyrtpkasncbj", arg[1])) {
            if (++i == argc) die_usage("%s: value missing, expected one after it", arg);
            parse_option(&o, arg, argv[i]);
        } else if (arg[0] == '-') {
            die_usage("%s: unknown option, expected one of those that -h lists", arg);
        } else if (o.model) {
            die_usage("%s: unexpected, expected one MODEL, found also \"%s\"", arg, o.model);
        } else {
            o.model = arg;
        }
    }
    if (!o.model) die_usage("MODEL: missing, expected a .bin file; -h shows more");
    if (quiet && o.verbose) die_usage("-q, -v: both given, expected one of them");
    check_text(&o, o.mode);
    return o;
}

// The prompt as -i, -f and stdin give it; false: a conversation.
static bool read_prompt(Engine *e) {
    const Options *o = &e->options;
    Buffer *text = &e->input;
    const bool terminal = isatty(STDIN_FILENO), chat = e->mode == CHAT;
    check_text(o, e->mode);
    if (o->text) buffer_add(text, bytes(o->text));
    if (o->text && o->file) buffer_add(text, bytes("\n\n"));
    if (!o->text && !o->file) {
        if (o->mode == CHAT || (chat && terminal)) return false;
        if (terminal) return true;  // generate from nothing
    }
    if (!o->text || o->file) {
        bool from_stdin = !o->file || !strcmp(o->file, "-");
        int fd = from_stdin ? STDIN_FILENO : open(o->file, O_RDONLY);
        if (fd < 0) die("%s: %s", o->file, strerror(errno));
        size_t before = text->n;
        file_read(text, fd, from_stdin ? "stdin" : o->file);
        if (!from_stdin) close(fd);
        if (chat) text->n = before + chop((Bytes){text->p + before, text->n - before}).n;
    }
    return true;
}

static void choose_chat(Engine *e) {
    const Options *o = &e->options;
    Tokenizer *t = &e->tokenizer;
    e->think = o->think == 1;
    bool older = !t->has_chat && chat_from_templates(t, o->model, e->think);
    if (!t->has_chat && !older) t->chat = chatml();
    if (older && o->system && !t->chat.system_opens_user)
        die("-y: no form with a system prompt, expected %s.template.with-system", o->model);
    bool can_switch = !bytes_equal(t->chat.answer[0], t->chat.answer[1]);
    e->no_switch = o->think >= 0 && !can_switch;
    if (can_switch && !e->think && t->temperature != 0) {  // Qwen's advice
        t->temperature = 0.7f;
        t->top_p = 0.8f;
        t->top_k = 20;
    }
}

static void choose_sampling(Engine *e) {
    const Options *o = &e->options;
    const Tokenizer *t = &e->tokenizer;
    e->sampler = (Sampler){
        .temperature = o->temperature >= 0 ? o->temperature : t->temperature,
        .top_p = o->top_p >= 0 ? o->top_p : t->top_p,
        .top_k = o->top_k >= 0 ? o->top_k : t->top_k,
        .presence = o->presence,
        .repetition = t->repetition,
        .rng = o->seed,
        .answered = alloc(t->vocab_size, sizeof(bool), "the sampler"),
        .seen = alloc(t->vocab_size, sizeof(bool), "the sampler"),
    };
}

static void load(Engine *e) {
    const Options *o = &e->options;
    const Config *g = &e->model.config;
    char tokenizer[4096];
    model_map(&e->model, o->model);
    if (!beside(tokenizer, o->model, ".tokenizer"))
        die("%s: missing, expected beside the model, where export.py writes it", tokenizer);
    tokenizer_load(&e->tokenizer, tokenizer, g->vocab_size);
    e->mode = o->mode < 0 ? e->tokenizer.mode : (Mode)o->mode;
    int context = o->context > 0 ? o->context : g->max_seq_len;
    if (o->context < 0) context = min_int(4096, g->max_seq_len);
    if (context > g->max_seq_len)
        die("-c: beyond the model, expected at most %d (export.py --yarn stretches it), found %d",
            g->max_seq_len, context);
    if (e->mode == TOKENIZE) return;
    start_threads(o->threads > 0 ? o->threads : cpu_count());
    int logit_rows = e->mode == PERPLEXITY ? 16 : e->mode == EMBED ? 0 : DRAFT_ROWS;
    int batch = min_int(o->batch, context);
    state_init(&e->model, context, batch, min_int(logit_rows, batch));
}

static int run(Engine *e) {
    const Options *o = &e->options;
    load(e);
    const bool chat = e->mode == CHAT, terminal = isatty(STDOUT_FILENO);
    if (chat) choose_chat(e);
    choose_sampling(e);
    e->writer = (Writer){.chat = chat, .terminal = terminal};
    e->writer.dim = terminal && !getenv("NO_COLOR");
    if (chat && o->system) conversation_add(&e->conversation, SYSTEM, bytes(o->system));
    const bool single = read_prompt(e);
    stoppable = e->mode != TOKENIZE;
    if (!single) return run_conversation(e);
    Bytes text = {e->input.p, e->input.n};
    Ending ending = chat ? chat_turn(e, text, true) : run_raw(e, text);
    return ending == INTERRUPTED ? EXIT_INTERRUPT : EXIT_SUCCESS;
}

// A CPU older than the one this was built for. Before main, and nothing but calls: no code in which
// the compiler could use a new instruction.
static void on_unknown_instruction(int signal) {
    (void)signal;
    static const char line[] = "qwen3: CPU: lacks an instruction of this build, expected one like "
        "that it was built on (" SIMD "); make builds for this one, make portable for all\n";
    (void)!write(STDERR_FILENO, line, sizeof(line) - 1);
    _exit(EXIT_FAILURE);
}

__attribute__((constructor)) static void catch_unknown_instructions(void) {
    signal(SIGILL, on_unknown_instruction);
}

#ifndef TEST
int main(int argc, char **argv) {
    static Engine e;
    start_platform(&argc, &argv);
    e.options = parse_options(argc, argv);
    sigaction(SIGPIPE, &(struct sigaction){.sa_handler = SIG_IGN}, NULL);
    sigaction(SIGTERM, &(struct sigaction){.sa_handler = on_end, .sa_flags = SA_RESETHAND}, NULL);
    sigaction(SIGBUS, &(struct sigaction){.sa_handler = on_end}, NULL);
    sigaction(SIGINT, &(struct sigaction){.sa_handler = on_interrupt}, NULL);
    return run(&e);
}
#endif
