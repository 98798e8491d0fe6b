// Fuzzing of qwen3.c: tests/fuzz TARGET SECONDS [SEED [INPUTS]] mutates the inputs of seeds[] for so
// long, or up to so many; tests/fuzz TARGET FILE... runs files; tests/fuzz -w DIR writes the seeds.
// With -DLIBFUZZER and clang's -fsanitize=fuzzer the mutations follow the coverage; FUZZ_TARGET names
// the target.
//
// What qwen3.c wants from the system is played here, so that an input needs microseconds: files are
// in memory, exit() comes back, what was allocated goes with the input that it was for.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

// ---- The system, played

static jmp_buf left;            // where exit() goes
static int exit_status;
static void *blocks[1 << 12];   // everything allocated; the first `kept` stay
static size_t n_blocks, kept;
static struct { const char *name; uint8_t *p; size_t n, at; } files[8];
static size_t n_files;
static uint8_t written[1 << 18];  // stdout
static size_t n_written;
static char said[4096];         // the last report on stderr
static int reports;
static const uint8_t *typed;    // stdin
static size_t n_typed;
static int terminals;           // bit fd: it is one
static size_t read_at_once;     // bytes of stdin that arrive together, 0: all
static bool pasting;            // the lines of a terminal arrive together
static unsigned polls;          // questions whether there is something to read: the fourth is denied
static bool must_succeed;       // nothing may be wrong now
static long until_ctrl_c;       // so many calls for memory or writes, if not 0

static const uint8_t *input;    // being run
static size_t input_size;

static void failed(void) {      // keeps the input that broke it
    FILE *f = fopen("fuzz-failed", "wb");
    if (f) fwrite(input, 1, input_size, f), fclose(f);
    fprintf(stderr, "tests/fuzz: the input is in fuzz-failed\n");
}

#define CHECK(condition) \
    ((condition) ? (void)0 : (fprintf(stderr, "tests/fuzz.c:%d: %s\n", __LINE__, #condition), \
                              failed(), abort()))

_Noreturn static void fuzz_exit(int status) {
    exit_status = status;
    longjmp(left, 1);
}

static volatile sig_atomic_t interrupted;

static void count_down(void) {
    if (until_ctrl_c > 0 && --until_ctrl_c == 0) interrupted = 1;
}

static void *fuzz_realloc(void *p, size_t size) {
    count_down();
    if (size > 64 << 20) return NULL;  // a machine with little memory
    CHECK(n_blocks < sizeof(blocks) / sizeof(*blocks));
    if (!p) return blocks[n_blocks++] = malloc(size);
    size_t i = n_blocks;
    while (blocks[i - 1] != p) CHECK(--i > 0);
    return blocks[i - 1] = realloc(p, size);
}

// Tables for all of Unicode that few pages of are touched. These pages are zeroed after each input,
// in a tenth of the time that it takes to have a new block; a page after it can't be touched.
static struct { uint8_t *p; bool used; } table;
enum { TABLE_SIZE = 1 << 25, GUARD = 1 << 16 };

static void table_clear(void) {
    if (!table.p) {
        table.p = mmap(NULL, TABLE_SIZE + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        CHECK(table.p != MAP_FAILED && mprotect(table.p + TABLE_SIZE, GUARD, PROT_NONE) == 0);
    }
    if (table.used) CHECK(madvise(table.p, TABLE_SIZE, MADV_DONTNEED) == 0);
    table.used = false;
}

static void *fuzz_calloc(size_t count, size_t size) {
    if (count * size > 64 << 20) return NULL;
    if (table.p && !table.used && count * size > 1 << 21 && count * size <= TABLE_SIZE) {
        table.used = true;
        return table.p + TABLE_SIZE - count * size;
    }
    CHECK(n_blocks < sizeof(blocks) / sizeof(*blocks));
    return blocks[n_blocks++] = calloc(count, size);
}

static void fuzz_free(void *p) {
    size_t i = n_blocks;
    if (!p) return;
    while (blocks[i - 1] != p) CHECK(--i > 0);
    blocks[i - 1] = blocks[--n_blocks];
    free(p);
}

static void file_add(const char *name, const void *p, size_t n) {
    files[n_files].name = name;
    files[n_files].p = malloc(n ? n : 1);  // of its own, so that a read past its end is seen
    files[n_files].n = n;
    if (n) memcpy(files[n_files].p, p, n);
    n_files++;
}

static int fuzz_open(const char *path) {
    for (size_t i = 0; i < n_files; i++) {
        if (!strcmp(files[i].name, path)) return files[i].at = 0, 100 + (int)i;
    }
    errno = ENOENT;
    return -1;
}

static int fuzz_fstat(int fd, struct stat *st) {
    *st = (struct stat){.st_mode = S_IFIFO};
    if (fd >= 100) *st = (struct stat){.st_mode = S_IFREG, .st_size = (off_t)files[fd - 100].n};
    return 0;
}

static ssize_t fuzz_write(int fd, const void *p, size_t n) {
    if (fd >= 100) {
        uint8_t *grown = realloc(files[fd - 100].p, files[fd - 100].n + n);
        memcpy(grown + files[fd - 100].n, p, n);
        files[fd - 100].p = grown, files[fd - 100].n += n;
        return (ssize_t)n;
    }
    CHECK(n <= sizeof(written) - n_written);
    memcpy(written + n_written, p, n);
    n_written += n;
    count_down();
    return (ssize_t)n;
}

// At a terminal Ctrl-C comes instead of its byte, Ctrl-D ends the input once, and a line at a time
// arrives.
static ssize_t fuzz_read(int fd, void *p, size_t n) {
    if (fd >= 100) {
        size_t left = files[fd - 100].n - files[fd - 100].at;
        n = n < left ? n : left;
        memcpy(p, files[fd - 100].p + files[fd - 100].at, n);
        files[fd - 100].at += n;
        return (ssize_t)n;
    }
    n = n < n_typed ? n : n_typed;
    if (read_at_once && n > read_at_once) n = read_at_once;
    for (size_t i = 0; i < n && (terminals & 1); i++) {
        bool control = typed[i] == 3 || typed[i] == 4;
        if (control && i == 0) {
            interrupted = typed[0] == 3;
            typed++, n_typed--;
            errno = EINTR;
            return interrupted ? -1 : 0;
        }
        if (control) n = i;
        else if (typed[i] == '\n' && !pasting) n = i + 1;
    }
    memcpy(p, typed, n);
    typed += n;
    n_typed -= n;
    return (ssize_t)n;
}

static ssize_t fuzz_pread(int fd, void *p, size_t n, size_t at) {
    files[fd - 100].at = at < files[fd - 100].n ? at : files[fd - 100].n;
    return fuzz_read(fd, p, n);
}

static int fuzz_close(int fd) { return fd < 0 ? -1 : 0; }

static int fuzz_waiting(int *n) {
    *n = pasting ? (int)n_typed : 0;
    return 0;
}

static int fuzz_poll(const struct pollfd *p, nfds_t n, int timeout) {
    return p && n && timeout >= -1 && ++polls % 4 != 0;
}

static int fuzz_fprintf(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(said, sizeof(said), format, args);
    va_end(args);
    reports += !strncmp(said, "qwen3: ", 7);
    return 0;
}

#define exit fuzz_exit
#define malloc(size) fuzz_realloc(NULL, size)
#define calloc fuzz_calloc
#define realloc fuzz_realloc
#define free fuzz_free
#define open(path, flags, mode) fuzz_open(path)
#define fstat fuzz_fstat
#define mmap(address, size, protection, flags, fd, offset) ((void *)files[(fd) - 100].p)
#define close fuzz_close
#define read fuzz_read
#define write fuzz_write
#define pread fuzz_pread
#define ioctl(fd, request, n) fuzz_waiting(n)
#define poll(...) fuzz_poll(__VA_ARGS__)
#define isatty(fd) ((fd) < 3 && (terminals >> (fd) & 1))
#define tcgetattr(fd, mode) (-1)
#define nanosleep(time, rest) (void)0
#define fprintf(stream, ...) fuzz_fprintf(__VA_ARGS__)
#define fputc(c, stream) (void)0
#define fputs(s, stream) (void)0
#define fwrite(p, size, n, stream) (void)0
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
#undef exit
#undef malloc
#undef calloc
#undef realloc
#undef free
#undef open
#undef read
#undef ioctl
#undef poll
#undef write
#undef fprintf
#undef fputc
#undef fputs
#undef fwrite
#include "naive.h"

// ---- What the targets share

static Tokenizer tiny;   // the real kind: tests/tiny
static Model toy;        // 32 wide, with tiny's vocabulary
static Pass toy_pass;    // what it runs with, to begin with
static Bytes toy_file;
static Pass *the_pass;   // that of pass_init: the threads know this one

// The pass as it was at first: an input may change it
static Pass *own_pass(void) {
    *the_pass = toy_pass;
    return the_pass;
}

static Bytes rest(const uint8_t *p, size_t n) { return (Bytes){p, n}; }

static uint8_t take_byte(Bytes *in) {  // 0 at the end
    if (!in->n) return 0;
    uint8_t byte = in->p[0];
    *in = bytes_from(*in, 1);
    return byte;
}

// What is before the next `end`, which goes.
static Bytes take_until(Bytes *in, uint8_t end) {
    const uint8_t *p = in->n ? memchr(in->p, end, in->n) : NULL;
    Bytes part = {in->p, p ? (size_t)(p - in->p) : in->n};
    *in = bytes_from(*in, part.n + (p != NULL));
    return part;
}

static Bytes take_up_to(Bytes *in, size_t n) {
    Bytes part = {in->p, n < in->n ? n : in->n};
    *in = bytes_from(*in, part.n);
    return part;
}

static Buffer decoded(const Tokenizer *t, const Ids *ids) {
    Buffer text = {0};
    for (size_t i = 0; i < ids->n; i++) {
        CHECK(ids->p[i] >= 0 && ids->p[i] < t->vocab_size);
        buffer_add(&text, t->text[ids->p[i]]);
    }
    return text;
}

// Can these bytes drive a terminal? Dimming may.
static bool harmless(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint8_t next = i + 1 < n ? p[i + 1] : 0;
        if (p[i] == 27 && i + 4 <= n && (!memcmp(p + i, "\033[2m", 4) || !memcmp(p + i, "\033[0m", 4))) continue;
        if (p[i] == 127 || (p[i] == 0xC2 && next >= 0x80 && next < 0xA0)) return false;
        if (p[i] >= 0xC0 && code_point_at(rest(p, n), i).c >= BAD_BYTE) return false;
        if (p[i] >= 0x80 && p[i] < 0xC0 && (i == 0 || p[i - 1] < 0x80)) return false;
        if (p[i] < ' ' && p[i] != '\n' && p[i] != '\t' && !(p[i] == '\r' && next == '\n')) return false;
    }
    return true;
}

// ---- Target model: a header, from which the size and the rest of the file follow

static int64_t size_of(const int32_t *h) {  // -1: too large to try
    const int64_t dim = h[2], hidden = h[3], layers = h[4], heads = h[5], kv = h[6], vocab = h[7],
                  hd = h[9], group = h[11] > 0 ? h[11] : 64, n_experts = h[23], experts = max_int(h[23], 1);
    for (int i = 2; i <= 9; i++) {
        if (h[i] < 0 || (i != 8 && h[i] > 4096)) return -1;
    }
    for (int i = 33; i <= 38; i++) {
        if (h[i] < 0 || h[i] > 4096) return -1;
    }
    if (n_experts < 0 || n_experts > 4096) return -1;
    const int64_t all = experts + h[38], deltas = h[33] ? layers - layers / h[33] : 0;
    const int64_t k = h[34] * DELTA_DIM, v = h[35] * DELTA_DIM, kinds[] = {layers - deltas, deltas};
    int64_t floats = 2 * layers * dim + dim + (h[22] ? 0 : 2 * kinds[0] * hd) +
                     (h[21] ? layers * (heads + 2 * kv) * hd : 0) +  // and biases
                     layers * (n_experts + h[38]) * dim + (h[14] == 2 ? (h[36] ? h[36] : hd) / 2 : 0) +
                     deltas * (4 * (2 * k + v) + DELTA_DIM + 2 * h[35] * (1 + dim));
    const struct { int64_t n, rows, cols; int bit; } matrices[] = {
        {kinds[0], heads * hd, dim, 0}, {kinds[0], kv * hd, dim, 1}, {kinds[0], kv * hd, dim, 2},
        {kinds[0], dim, heads * hd, 3}, {kinds[0], h[37] * heads * hd, dim, 7},
        {deltas, k, dim, 0}, {deltas, k, dim, 1}, {deltas, v, dim, 2}, {deltas, dim, v, 3}, {deltas, v, dim, 7},
        {layers, all * hidden, dim, 4}, {layers, all * dim, hidden, 5}, {layers, all * hidden, dim, 6},
        {h[10] == 0 ? 2 : 1, vocab, dim, 8}};
    int64_t size = 256 + 4 * floats;
    for (size_t i = 0; i < sizeof(matrices) / sizeof(*matrices); i++) {
        const int64_t rows = h[32] == 1 ? (matrices[i].rows + 15) / 16 * 16 : matrices[i].rows;
        const int64_t n = rows * matrices[i].cols;
        const int bits = h[26] == 4 && matrices[i].bit < 8 && !(h[27] >> matrices[i].bit & 1) ? 4 : 8;
        size += matrices[i].n * (n * bits / 8 + n / group * bits / 2);
    }
    return size < 100000 ? size : -1;
}

static void fuzz_model(Bytes in) {
    static const float values[] = {0.01f, -0.02f, 1, -1, 0.1f, 0, 3, -0.5f, NAN, INFINITY, -INFINITY,
                                   3e38f, -3e38f, 1e-45f, 1e-38f, 1e20f};
    static const int off[] = {0, 0, 0, 0, 1, -1, 4, -4};
    static union { uint8_t bytes[100256]; int32_t h[64]; float f[25064]; } file;
    uint8_t flags = take_byte(&in), spread = take_byte(&in) % 8 ? 8 : 16;  // mostly sane weights
    Bytes head = take_up_to(&in, 156);
    memset(file.bytes, 0, 256);
    if (head.n) memcpy(file.bytes, head.p, head.n);
    int64_t size = size_of(file.h);
    if (size < 0) size = 256 + 64;
    uint64_t rng = flags;
    for (int64_t i = 64; i < size / 4 + 1; i++) {
        uint8_t byte = in.n ? in.p[i % in.n] : 0;
        file.f[i] = values[(byte + (random_next(&rng) < 0.5)) % spread];
    }
    file_add("model", file.bytes, (size_t)(size + off[flags % 8]));
    static Engine e;
    e = (Engine){.options.n = -1};
    model_map(&e.model, "model", true);
    Config *g = &e.model.config;
    CHECK((int64_t)files[0].n == size && size_of(file.h) == size);
    int n = 5 + flags / 8 % 16, ids[21];
    if (g->max_seq_len > 4096) {
        e.model.context = g->max_seq_len;
        pass_init(&e.model, 1, 1, 1);  // enough memory for one of them
        return;
    }
    n = min_int(n, g->max_seq_len);
    e.model.context = n;
    e.pass = pass_init(&e.model, n, 2, 1);
    for (int i = 0; i < n; i++) ids[i] = (i * 7 + flags) % g->vocab_size;
    // all at once, and one by one: the same logits
    float *batched = alloc(g->vocab_size, sizeof(float), "a test");
    const int *text = whole_cache(e.pass);
    e.model.state.delta = alloc(state_size(g), sizeof(float), "a test");
    forward_text(e.pass, text, ids, n, 0, 1);
    memcpy(batched, classify(e.pass, 1), g->vocab_size * sizeof(float));
    for (int i = 0; i < n; i++) forward_text(e.pass, text, ids + i, 1, i, 1);
    float *logits = classify(e.pass, 1);
    if (isfinite(sum_double(logits, g->vocab_size)))
        CHECK(!memcmp(logits, batched, g->vocab_size * sizeof(float)));
    e.tokenizer = (Tokenizer){.vocab_size = g->vocab_size, .tables = tiny.tables};
    e.most_texts = 1;
    e.mode = PERPLEXITY;
    prepare_places(&e);
    if (n > 1) {
        Text *a = add_text(&e, &(Ids){ids, n, n}, 0, false);
        while (a->ending == GOES_ON && run_pass(&e)) {}
        CHECK(a->ending == FAILED || (a->ending == COMPLETE && a->target == (size_t)n));
    }
    Sampler sampler = {.temperature = flags & 64 ? 0.7f : 0, .top_p = 0.9f, .top_k = 20, .repetition = 1,
                          .seen = alloc(g->vocab_size, 1, "a test"),
                          .in_answer = alloc(g->vocab_size, 1, "a test")};
    bool finite = isfinite(sum_double(batched, g->vocab_size));
    int id = sample(&sampler, batched, g->vocab_size);
    CHECK(finite ? id >= 0 && id < g->vocab_size : id == -1);
}

// ---- Target tokenizer: a tokenizer file, whole or from a recipe, and a text

static void add_u32(Buffer *b, uint32_t value) { buffer_add(b, rest((uint8_t *)&value, 4)); }

static void add_record(Buffer *b, float score, uint32_t length, Bytes text) {
    buffer_add(b, rest((uint8_t *)&score, 4));
    add_u32(b, length);
    buffer_add(b, text);
}

// Sections until a tag that there is not; a length of 255 is a lie.
static void add_sections(Buffer *b, Bytes *in) {
    static const char tags[][5] = {"adde", "clas", "ccc ", "deco", "head", "tail", "stop", "samp", "chat", "repe",
                                   "mode", "nfcq", "nfcd", "nfcc", "begn", "from", "xxxx", "", "cl"};
    for (uint8_t tag; in->n && (tag = take_byte(in)) < sizeof(tags) / sizeof(*tags);) {
        uint32_t length = take_byte(in), lie = length;
        Bytes payload = take_up_to(in, length);
        if (length == 255 && payload.n >= 4) memcpy(&lie, payload.p, 4);
        else lie = (uint32_t)payload.n;
        buffer_add(b, rest((const uint8_t *)tags[tag], 4));
        add_u32(b, lie);
        buffer_add(b, payload);
    }
}

static void fuzz_tokenizer(Bytes in) {
    static const float scores[] = {-1, -2, -3, -3, -4, 0, -1e6f, -1e6f, -2e6f, NAN, INFINITY,
                                   -INFINITY};
    uint8_t flags = take_byte(&in), vocab = take_byte(&in) % 16;
    Buffer file = {0};
    if (flags % 8 == 7) {                       // as it is
        buffer_add(&file, in);
    } else {
        add_u32(&file, 16);
        add_u32(&file, take_byte(&in));
        add_u32(&file, take_byte(&in));
        for (int i = 0; i < 256; i++) add_record(&file, -1e6f, 1, rest((uint8_t[]){i}, 1));
        for (int i = 0; i < vocab; i++) {
            uint8_t score = take_byte(&in) % 12, length = take_byte(&in);
            Bytes text = take_up_to(&in, length & 15);
            add_record(&file, scores[score], length == 255 ? 0x80000000 : (uint32_t)text.n, text);
        }
        if (flags & 32) vocab += flags >> 6;    // the next model's tokenizer
        Buffer sections = {0};
        bool bare = flags % 32 == 6;
        if (!bare) add_sections(&sections, &in);
        uint32_t ascii[] = {'0', '9', NUMBER, 'a', 'z', LETTER};
        if (!bare) {                            // saves a loop over Unicode
            buffer_add(&sections, bytes("clas"));
            add_u32(&sections, sizeof(ascii));
            buffer_add(&sections, rest((uint8_t *)ascii, sizeof(ascii)));
        }
        buffer_add(&file, bytes("q3tx"));
        add_u32(&file, 1);
        add_u32(&file, (uint32_t)sections.n);
        buffer_add(&file, rest(sections.p, sections.n));
    }
    file_add("tokenizer", file.p, file.n);
    Tokenizer t;
    tokenizer_load(&t, "tokenizer", 256 + vocab);
    Ids ids = {0};
    encode_raw(&t, take_up_to(&in, 100), &ids);
    decoded(&t, &ids);
    Message user = {.role = USER}, answer = {.role = ASSISTANT};
    for (size_t i = 0; i < ids.n; i++) {
        buffer_add(&answer.text, text_of(&t, ids.p[i]));
        buffer_add(&user.text, t.text[ids.p[i]]);
    }
    Message talk[] = {user, answer, user};
    render(&t, &(Conversation){talk, 3, 3}, 0, flags & 8, &ids);
    decoded(&t, &ids);
    for (size_t i = 0; i < t.stop.n; i++) CHECK(is_stop(&t, t.stop.p[i]));
}

// ---- Target text: a text's tokens, against slow ways to the same

// NFC(s) without the shortcut: all characters are decomposed, ordered and composed.
static Buffer slow_nfc(const Tokenizer *t, Bytes s) {
    Keys chars = {0};
    Buffer out = {0};
    for (size_t at = 0; at < s.n;) {
        Char c = char_at(t, s, at);
        decompose(t, &chars, c.c);
        at += c.n;
    }
    order_and_compose(t, &chars);
    for (size_t i = 0; i < chars.n; i++) add_char(&out, chars.p[i] & CHAR_MASK);
    return out;
}

static void encode_as_text(const Tokenizer *t, Bytes text, Ids *ids) {
    Encoder e = {.tok = t, .out = ids};
    encode_plain(&e, text);
    encode_flush(&e);
}

static void fuzz_text(Bytes in) {
    const Tokenizer *t = &tiny;
    size_t cut = take_byte(&in);
    Ids ids = {0}, again = {0};
    Buffer normal = {0}, twice = {0};
    encode_as_text(t, in, &ids);
    Buffer text = decoded(t, &ids), slow = slow_nfc(t, in);
    Bytes whole = {text.p, text.n};
    // ids say NFC(text), and NFC is what it is done slowly, and done twice
    normalize(t, &normal, in);
    normalize(t, &twice, rest(normal.p, normal.n));
    CHECK(bytes_equal(whole, rest(normal.p, normal.n)));
    CHECK(bytes_equal(whole, rest(slow.p, slow.n)));
    CHECK(bytes_equal(whole, rest(twice.p, twice.n)));
    bool active = false;  // NFC may change it
    for (size_t at = 0; at < in.n;) {
        Char c = char_at(t, in, at);
        active |= is_active(t, c);
        at += c.n;
    }
    if (!active) CHECK(bytes_equal(whole, in));
    // the same ids from NFC(text), and from the text in two parts
    encode_as_text(t, whole, &again);
    CHECK(same_ids(&ids, &again));
    again.n = 0;
    Encoder e = {.tok = t, .out = &again};
    cut = cut < in.n ? cut : in.n;
    encode_plain(&e, (Bytes){in.p, cut});
    encode_plain(&e, bytes_from(in, cut));
    encode_flush(&e);
    CHECK(same_ids(&ids, &again));
    // the same merges in each piece, by the definition
    again.n = 0;
    for (Bytes left = whole; left.n;) {
        Bytes piece = take_up_to(&left, piece_length(t, left));
        CHECK(piece.n > 0);
        if (piece.n > 256) return;
        encode_piece(t, piece, &again);
    }
    CHECK(same_ids(&ids, &again));
    // added tokens cut the text: each part by itself
    ids.n = again.n = 0;
    encode_part(t, in, true, &ids);
    size_t at = 0, from = 0;
    for (int id; (id = added_next(t, in, &at, ADDED)) >= 0; from = at += t->text[id].n) {
        encode_as_text(t, (Bytes){in.p + from, at - from}, &again);
        ids_add(&again, id);
    }
    encode_as_text(t, bytes_from(in, from), &again);
    CHECK(same_ids(&ids, &again));
}

// ---- Target chat: template pieces and a conversation

static int count_added(const Tokenizer *t, const Ids *ids) {
    int n = 0;
    for (size_t i = 0; i < ids->n; i++) n += t->kind[ids->p[i]] & ADDED;
    return n;
}

static int count_spelled(const Tokenizer *t, Bytes s, int which) {
    int n = 0, id;
    for (size_t at = 0; (id = added_next(t, s, &at, which)) >= 0; at += t->text[id].n) n++;
    return n;
}

static int count_marked(const Tokenizer *t, Bytes s) { return count_spelled(t, s, ADDED); }

static void fuzz_chat(Bytes in) {
    uint8_t flags = take_byte(&in);
    bool think = flags & 1;
    Tokenizer t = tiny;
    ChatFormat *f = &t.chat;
    Tables *tables = t.tables;  // the tiny model's: a process runs one target, so no other sees what is set there
    Bytes *pieces[] = {&f->start, &f->no_system[0], &f->no_system[1], &f->open[0], &f->open[1], &f->open[2],
                       &f->close[0], &f->close[1], &f->close[2], &f->answer_open[0], &f->answer_open[1],
                       &tables->begun, &tables->strip, &tables->trim, &tables->system_to_think};
    uint8_t kind[t.vocab_size];
    t.kind = memcpy(kind, tiny.kind, sizeof(kind));
    if (flags & 16) kind[token_find(&t, bytes("<tool_call>"), true)] |= A_WORD;  // as a fine-tune's words
    tables->begun = tables->system_to_think = (Bytes){0};
    tables->keeps = false;
    if (flags % 8 < 2) {
        set_chatml(&t, flags & 32);
    } else {
        for (int i = 0; i < 15; i++) *pieces[i] = take_until(&in, 0xFF);
        tables->keeps = flags & 64;
    }
    Conversation c = {0};
    Ids ids = {0};
    int expected = 0, more = 0;
    bool begun = false;  // the last message is an answer that is to go on
    for (int i = 0; in.n && i < 20; i++) {
        int role = take_byte(&in) % 3;
        Bytes text = take_until(&in, 0xFF);
        begun = role == ASSISTANT && (!in.n || i == 19);
        conversation_add(&c, role, text);
        if (role != ASSISTANT) expected += count_spelled(&t, text, ANSWERED | A_WORD);
        else more += count_spelled(&t, text, ANSWERED);  // but for thinking
        if (begun) break;
        bool instructs = role == SYSTEM && think && tables->system_to_think.p;
        expected += count_marked(&t, instructs ? tables->system_to_think : f->open[role]) + count_marked(&t, f->close[role]);
    }
    render(&t, &c, 0, think, &ids);
    expected += count_marked(&t, f->start);
    if (!begun) expected += count_marked(&t, f->answer_open[think]);
    else more += count_marked(&t, f->open[ASSISTANT]) + count_marked(&t, tables->strip) + 2  // <think> and </think>
        + count_marked(&t, tables->begun.p ? tables->begun : f->answer_open[0]);
    if (c.n == 0 || c.p[0].role != SYSTEM) expected += count_marked(&t, f->no_system[think]);
    // what a user types never becomes a control token; only a word is a token
    int added = count_added(&t, &ids);
    CHECK(added >= expected && added <= expected + more);
    decoded(&t, &ids);
    while (c.n) conversation_drop(&c, c.n / 2, c.n / 2 + 1);
}

// ---- Target session: a command line and stdin, up to the answer

// Sets what load_model() sets by the options, of a mode that is known
static void obey_options(Engine *e) {
    const Options *o = &e->options;
    split_answers(e);
    if (o->answers && !modes[e->mode].has_answers) die_usage("-o: -m %s has no answers", modes[e->mode].name);
    e->kind = o->member ? OWN_CHOICES : o->answers ? CHOICES : (int)e->mode;
    e->most_texts = o->list || o->answers ? min_int(MOST_TEXTS, o->batch) : 1;
    if (o->form && !modes[e->mode].has_answers) die_usage("-g: -m %s has no answers", modes[e->mode].name);
    if (o->form) e->form = make_form(o->form), list_tokens(e->form, &e->tokenizer, e->mode == CHAT);
}

static void fuzz_session(Bytes in) {
    static Engine engine;
    char *argv[40] = {"qwen3"};
    int argc = 1;
    uint8_t flags = take_byte(&in);
    terminals = flags & 3;
    quiet = flags & 4;
    pasting = flags & 8;
    read_at_once = flags >> 4;
    file_add("f", "a file's text\n", 14);
    file_add("e", "", 0);
    while (in.n && argc < 39) {
        Bytes arg = take_until(&in, 0);
        if (arg.n == 0) break;
        argv[argc] = alloc(arg.n + 1, 1, "a test");
        memcpy(argv[argc++], arg.p, arg.n);
    }
    typed = in.p;
    n_typed = in.n;
    engine = (Engine){.options = parse_options(argc, argv), .model = toy, .pass = own_pass(), .tokenizer = tiny};
    Engine *e = &engine;
    Options *o = &engine.options;
    toy.config.cache_bits = e->model.config.cache_bits = o->cache_bits;
    CHECK(o->model && o->mode >= -1 && o->mode < N_MODES && o->batch >= 1 && o->batch <= 512);
    int most = e->model.context;
    e->pass->batch = min_int(o->batch, e->pass->batch);
    e->model.context = o->context > 0 && o->context < most ? o->context : most;
    if (o->n < 0 || o->n > 2) o->n = 2;
    e->pass->logit_rows = min_int(e->pass->batch, e->pass->logit_rows);
    e->mode = o->mode < 0 ? CHAT : o->mode;
    obey_options(e);
    if (e->mode == PERPLEXITY && e->model.context < 2) return;  // load_model() refuses it
    bool chat = e->mode == CHAT;
    prepare_answers(&engine);
    prepare_places(&engine);
    if (chat && o->system) conversation_add(&engine.conversation, SYSTEM, bytes(o->system));
    o->out = NULL;                              // writes no files here
    if (o->list) {
        run_list(open_list(&engine));
        return;
    }
    bool once = read_prompt(&engine);
    Bytes text = bytes_of(&engine.input);
    if (!once && is_terminal(STDIN_FILENO)) run_dialogue(&engine);
    else if (!once) run_script(&engine);
    else chat_turn(&engine, text);
    for (int i = 0; i < e->most_texts; i++) CHECK(!e->places[i].writer->thinking && e->places[i].writer->held.n == 0);
    if (terminals & 2) CHECK(harmless(written, n_written));
    const Conversation *c = &engine.conversation;  // user, assistant, user, ... after the system
    size_t system = c->n && c->p[0].role == SYSTEM;
    for (size_t i = system; chat && i < c->n; i++) CHECK(c->p[i].role == ((i - system) % 2 ? ASSISTANT : USER));
}

// ---- Target list: any bytes as a list of texts or of JSON; what a text gets is what it gets alone

// A toy that can do what the options say, with a tokenizer and all of the cache
static void start_engine(Engine *e, int argc, char **argv) {
    *e = (Engine){.options = parse_options(argc, argv), .model = toy, .pass = own_pass(), .tokenizer = tiny};
    toy.config.cache_bits = e->model.config.cache_bits = e->options.cache_bits;
    gives_up = guesses = argc;  // see give_up, guess_any
    e->mode = e->options.mode;
    obey_options(e);
    e->pass->logit_rows = min_int(e->pass->batch, e->pass->logit_rows);
    prepare_answers(e);
    prepare_places(e);
    n_written = 0;
}

// A text without what is no UTF-8, which JSON does not have
static Buffer only_characters(Bytes in) {
    Buffer out = {0};
    for (size_t at = 0, n; at < in.n; at += n) {
        const Char c = char_at(&tiny, in, at);
        n = c.n;
        if (c.c < BAD_BYTE) buffer_add(&out, rest(in.p + at, n));
    }
    return out;
}

// A list of JSON strings from a list of texts
static Buffer list_of_strings(Bytes in) {
    Buffer out = {0};
    char escape[8];
    buffer_add(&out, bytes("\""));
    for (size_t i = 0; i < in.n; i++) {
        const uint8_t c = in.p[i];
        snprintf(escape, sizeof(escape), "\\u%04X", c);
        if (c == '\n') buffer_add(&out, bytes("\"\n\""));
        else buffer_add(&out, c == '"' || c == '\\' || c < ' ' ? bytes(escape) : rest(&c, 1));
    }
    buffer_add(&out, bytes("\""));
    return out;
}

// The line that this text has alone, of the same options without -l
static Buffer line_alone(int argc, char **argv, Bytes prefix, Bytes text) {
    static Engine engine;
    Buffer whole = {0}, line = {0};
    start_engine(&engine, argc, argv);
    if (prefix.n) buffer_add(&whole, prefix), buffer_add(&whole, bytes("\n\n"));
    buffer_add(&whole, text);
    if (engine.kind >= CHOICES) {  // with all probabilities, as a request of its own writes them
        if (engine.mode == CHAT && engine.options.system) conversation_add(&engine.conversation, SYSTEM, bytes(engine.options.system));
        conversation_add(&engine.conversation, USER, bytes_of(&whole));
        encode_prompt(&engine, &engine.conversation, 0);
        add_result(&line, &engine, run_request(&engine), NULL);
        return line;
    }
    if (engine.mode == CHAT && engine.options.system) conversation_add(&engine.conversation, SYSTEM, bytes(engine.options.system));
    chat_turn(&engine, bytes_of(&whole));
    const Bytes out = rest(written, n_written);
    if (engine.mode > GENERATE) {
        buffer_add(&line, out);
        return line;
    }
    buffer_add_json(&line, rest(out.p, out.n - (engine.mode == CHAT)), false);
    buffer_add(&line, bytes("\n"));
    return line;
}

// The same list again, with Ctrl-C in the middle: what is written is the beginning of `whole`, and a
// list that goes on as the message says gives the rest.
static void list_stopped(int argc, char **argv, char *seed, Bytes data, Bytes whole, long calls) {
    static Engine engine;
    start_engine(&engine, argc, argv);
    typed = data.p, n_typed = data.n;
    until_ctrl_c = calls;
    const int status = run_list(open_list(&engine));
    until_ctrl_c = 0;
    Bytes first = rest(written, n_written), left = whole;
    CHECK(first.n <= whole.n && (first.n == 0 || memcmp(first.p, whole.p, first.n) == 0));
    CHECK(first.n == 0 || first.p[first.n - 1] == '\n');
    CHECK(interrupted ? status == EXIT_INTERRUPT : first.n == whole.n);
    if (!interrupted) return;
    interrupted = 0;
    int lines = 0;
    for (; first.n; lines++) take_until(&first, '\n'), take_until(&left, '\n'), take_until(&data, '\n');
    if (!data.n) return;                        // a list of no lines is an error
    snprintf(seed, 16, "%d", 7 + lines);
    for (size_t i = 0; i < n_files; i++) free(files[i].p);
    n_files = 0;
    file_add("list", data.p, data.n);
    typed = data.p, n_typed = data.n;
    start_engine(&engine, argc, argv);
    run_list(open_list(&engine));
    CHECK(bytes_equal(rest(written, n_written), left));
}

static void fuzz_list(Bytes in) {
    static Engine engine;
    static uint8_t result[sizeof(written)];
    static char *modes[] = {"chat", "generate", "embed", "perplexity", "tokenize"};
    static char *lengths[] = {"0", "1", "2", "5", "20", "-1"}, *batches[] = {"1", "2", "5", "16"};
    static char *choices[] = {"e1|t2|o3|\"4|e15", "e|t|o|\"|a\xcc\x81",
                              " keeper, and so on, and on and on| keeper, and so on, and on and on or not| x"};
    static const int contexts[] = {64, 2 * LANES, 2 * LANES + 1, 3 * LANES - 1};
    const uint8_t flags = take_byte(&in), more = take_byte(&in), cache = take_byte(&in), edges = take_byte(&in);
    for (size_t i = 0; i + 1 < in.n; i++) {     // a mark of UTF-16 or UTF-8, which a list may begin or go on with
        if (!memcmp(in.p + i, "\xFF\xFE", 2) || !memcmp(in.p + i, "\xFE\xFF", 2) || !memcmp(in.p + i, "\xEF\xBB", 2))
            return;
    }
    static char *forms[] = {"[\\s\\S]{0,9}", "(yes|no|(th[ei] ?)*)e?", "\\w+ {2}.*|[^a]", "((a|e){2,5}\\n){2}"};
    char seed[16], *argv[28] = {"qwen3", "m.bin", "-s", seed, "-qq"};
    int argc = 5;
    const bool given = edges & 16 && flags % 5 < 2, formed = !given && edges & 4 && flags % 5 < 2;
    char *options[] = {"-m", modes[flags % 5], "-n", lengths[more % 6], "-b", batches[cache >> 6],
                       flags & 8 ? "-y" : NULL, "Be brief.", flags & 16 && !given && !formed ? "-x" : NULL, "e",
                       flags & 32 ? "-r" : NULL, edges & 32 ? "3" : "1", flags & 64 ? "-t" : NULL, "0",
                       given ? "-o" : NULL, choices[edges & 1 ? 2 : edges & 4 ? 1 : 0],
                       edges & 2 ? "-C" : NULL, "8", formed ? "-g" : NULL, forms[more % 4]};
    for (size_t i = 0; i < sizeof(options) / sizeof(*options); i += 2) {
        if (options[i]) argv[argc++] = options[i], argv[argc++] = options[i + 1];
    }
    const bool json = flags & 128, made = json && more & 64;
    const Buffer characters = made ? only_characters(in) : (Buffer){0};
    if (made) in = bytes_of(&characters);
    const Bytes prefix = more & 128 ? bytes("Is this so?") : (Bytes){0};
    Buffer strings = made ? list_of_strings(in) : (Buffer){0};
    const bool ahead = json && edges % 8 == 7;  // more lines that are done at once than may wait
    if (ahead) {
        if (!made) buffer_add(&strings, in);
        for (int i = 0; i < AHEAD + 50; i++) buffer_add(&strings, bytes("\nx"));
    }
    const Bytes data = made || ahead ? bytes_of(&strings) : in;
    read_at_once = more & 32 || ahead ? 0 : 1 + cache % 7;
    file_add("list", data.p, data.n);
    typed = data.p, n_typed = data.n;
    const int blocks = toy_pass.n_blocks, batch = toy_pass.batch, context = toy.context;
    toy.context = contexts[edges >> 6];
    const int one = (toy.context + toy_pass.block_len - 1) / toy_pass.block_len;
    toy_pass.n_blocks = min_int(one + cache / 8 % 8, blocks);  // some must give theirs back
    toy_pass.batch = atoi(batches[cache >> 6]);
    strcpy(seed, "7");
    char *list[] = {json ? "-L" : "-l", more & 16 ? "-" : "list", "-i", "Is this so?"};
    memcpy(argv + argc, list, sizeof(list));
    const int list_argc = argc + (prefix.n ? 4 : 2);
    start_engine(&engine, list_argc, argv);
    must_succeed = data.n > 0;                  // a list of no lines is an error
    const int status = run_list(open_list(&engine));
    // a line for each line; null, or in an object an error, for those of which something was said
    const size_t n = n_written;
    memcpy(result, written, n);
    size_t lines = 0, nulls = 0, in_lines = 0;
    for (Bytes left = data; left.n; in_lines++) take_until(&left, '\n');
    for (Bytes left = rest(result, n); left.n; lines++) nulls += bytes_equal(take_until(&left, '\n'), bytes("null"));
    CHECK(lines == in_lines && (n == 0 || result[n - 1] == '\n'));
    CHECK((json ? nulls <= (size_t)reports : nulls == (size_t)reports) && status == (reports > 0));
    if (edges & 8) list_stopped(list_argc, argv, seed, data, rest(result, n), 1 + edges / 8 % 8 * 20 + cache);
    // up to 4 texts alone; what is JSON after mutation is not known here
    toy_pass.batch = batch;
    if (given) argv[argc++] = "-i", argv[argc++] = "";  // no conversation
    Bytes texts = in, answers = rest(result, n);
    for (int i = 0; i < 4 && answers.n && (made || !json); i++) {
        Bytes text = take_until(&texts, '\n'), answer = take_until(&answers, '\n');
        const bool crlf = text.n && text.p[text.n - 1] == '\r' && text.p + text.n < in.p + in.n;
        if (!made && crlf) text.n--;
        if (bytes_equal(answer, bytes("null"))) continue;
        snprintf(seed, sizeof(seed), "%d", 7 + i);
        Buffer alone = line_alone(argc, argv, prefix, text);
        answer.n++;                             // with its newline
        CHECK(bytes_equal(bytes_of(&alone), answer));
    }
    toy_pass.n_blocks = blocks;
    toy.context = context;
}

// ---- Target kept: FILE of -K with any bytes changed, or cut, also with right hashes

// Gives a part of FILE its hash, and returns where the next part begins.
static size_t give_hash(uint64_t *seed, uint8_t *p, size_t at, size_t size) {
    const uint64_t hash = hash_of(*seed + at, p + at, size);
    memcpy(p + at + size, &hash, sizeof(hash));
    if (at <= IDS_AT) *seed = hash;
    return at + size + sizeof(hash);
}

static void give_hashes(const Filed *f, uint8_t *p, size_t n) {
    const size_t block = block_size(&toy.config) * sizeof(float);
    uint64_t seed = 0;
    size_t at = give_hash(&seed, p, 0, sizeof(Head));
    at = give_hash(&seed, p, at, f->ids.n * sizeof(int));
    while (at + block + sizeof(seed) <= n) at = give_hash(&seed, p, at, block);
}

static void fuzz_kept(Bytes in) {
    static Engine engine;
    static uint8_t result[1 << 12];
    const uint8_t flags = take_byte(&in), n_edits = take_byte(&in) % 8, cut = take_byte(&in);
    const bool forged = flags & 1, smaller = flags & 2;
    char *argv[] = {"qwen3", "m.bin", "-s", "7", "-qq", "-m", flags & 4 ? "embed" : "generate", "-K", "kept",
                    "-C", flags & 8 ? "8" : "32", "-b", flags & 16 ? "1" : "16", "-n", "3"};
    const int argc = flags & 4 ? 13 : 15;
    struct { size_t at; uint8_t bits; } edits[8] = {{0}};
    for (int i = 0; i < n_edits; i++) {
        edits[i].at = take_byte(&in);
        edits[i].at += take_byte(&in) << 8;
        edits[i].bits = take_byte(&in);
    }
    const Bytes text = in.n ? rest(in.p, min_size(in.n, 24)) : bytes("x");
    start_engine(&engine, argc, argv);
    engine.file = toy_file;
    chat_turn(&engine, text);
    const size_t n = n_written;
    CHECK(n <= sizeof(result));
    memcpy(result, written, n);
    if (engine.kept[0].n == 0) return;
    file_add("kept", "", 0);
    Filed out = {.e = &engine, .fd = 100 + (int)n_files - 1, .writes = true};
    CHECK(write_filed(&out, &engine.kept[0]));
    uint8_t *p = files[n_files - 1].p;
    size_t *size = &files[n_files - 1].n;
    const size_t whole = *size;
    uint8_t *before = memcpy(malloc(whole), p, whole);
    if (flags & 32) *size = whole * cut / 256;
    for (int i = 0; i < n_edits && *size; i++) p[edits[i].at % *size] ^= edits[i].bits;
    const bool changed = *size != whole || memcmp(before, p, whole);  // two edits may cancel out
    free(before);
    if (forged && !(flags & 32)) give_hashes(&out, p, *size);
    toy.context = smaller ? 32 : 64;
    memset(toy_pass.cache, 0, toy_pass.n_blocks * block_size(&toy.config) * sizeof(float));
    start_engine(&engine, argc, argv);
    engine.file = toy_file;
    Filed back = {.e = &engine, .fd = out.fd};
    const char *error = *size ? read_filed(&back) : NULL;
    CHECK(!changed || error || forged || smaller || !*size);
    CHECK(changed || !error);
    int used = 0;
    for (int i = 0; i < engine.pass->n_blocks; i++) used += engine.users[i] > 0;
    CHECK(used + engine.n_unused == engine.pass->n_blocks && (!error || used == 0));
    if (forged && changed) return;              // it may say anything
    chat_turn(&engine, text);
    CHECK(smaller || bytes_equal(rest(result, n), rest(written, n_written)));
}

// ---- Target sample: any logits and any options

static void fuzz_sample(Bytes in) {
    static bool seen[256];
    float logits[256], given[256], most;
    uint8_t flags = take_byte(&in), spread = take_byte(&in);
    Sampler s = {.temperature = flags & 1 ? 0 : 0.01f * spread, .top_k = take_byte(&in) % 64,
                 .top_p = (1 + take_byte(&in)) / 256.0f, .presence = flags & 2 ? 1.5f : 0,
                 .rng = take_byte(&in), .repetition = 1, .seen = seen, .in_answer = seen};
    int n = 0;
    while (in.n >= (flags & 4 ? 4 : 1) && n < 256) {
        Bytes v = take_up_to(&in, flags & 4 ? 4 : 1);
        if (flags & 4) memcpy(&logits[n], v.p, 4);
        else logits[n] = (float)(v.p[0] - 128) / 8;
        seen[n] = n % 3 == 0;
        given[n] = logits[n] - (s.presence != 0 && seen[n] ? s.presence : 0);
        n++;
    }
    if (n == 0) return;
    bool finite = isfinite(sum_double(logits, n));
    int id = sample(&s, logits, n);
    CHECK(finite ? id >= 0 && id < n : id == -1);
    if (!finite) return;
    int likelier = 0;
    double sum = 0, before = 0;
    most = given[argmax(given, n)];
    if (s.temperature == 0) CHECK(given[id] == most);
    if (s.temperature == 0) return;
    for (int i = 0; i < n; i++) {
        bool first = given[i] > given[id] || (given[i] == given[id] && i < id);
        likelier += first;
        sum += exp((given[i] - (double)most) / s.temperature);
        if (first) before += exp((given[i] - (double)most) / s.temperature);
    }
    // float rounding may make neighbours equal, so a little tolerance
    if (s.top_k > 0 && n > s.top_k && s.temperature > 0.1f && !(flags & 4))
        CHECK(likelier < s.top_k);
    else if (s.top_p < 1 && !(s.top_k > 0 && n > s.top_k) && !(flags & 4))
        CHECK(before <= sum * s.top_p + 1e-5 * sum);
}

// ---- Target form: an expression, and an answer of ids that it allows: there are always some, and where
// they may end they are characters

static void fuzz_form(Bytes in) {
    char text[257];
    const Bytes expression = take_until(&in, 0);
    memcpy(text, expression.p, expression.n);
    text[expression.n] = 0;
    Form *f = make_form(text);
    Buffer answer = {0};
    list_tokens(f, &tiny, true);
    for (int state = FORM_START, n = 0; n < 12; n++) {
        make_mask(f, &tiny, state);
        const uint32_t *mask = f->states[state].mask;
        int allowed = 0, id = -1, chosen = take_byte(&in) << 8;
        chosen |= take_byte(&in);
        for (int i = 0; i < tiny.vocab_size; i++) allowed += mask[i / 32] >> i % 32 & 1;
        CHECK(allowed > 0);
        for (int left = chosen % allowed; left >= 0; left -= mask[id / 32] >> id % 32 & 1) id++;
        for (size_t i = 0; i < tiny.stop.n; i++)
            CHECK((mask[tiny.stop.p[i] / 32] >> tiny.stop.p[i] % 32 & 1) == f->states[state].may_end);
        for (size_t at = 0; f->states[state].may_end && at < answer.n; at += code_point_at(bytes_of(&answer), at).n)
            CHECK(code_point_at(bytes_of(&answer), at).c < BAD_BYTE);
        if (is_stop(&tiny, id)) break;
        CHECK(!(tiny.kind[id] & SPECIAL) && tiny.text[id].n > 0);
        buffer_add(&answer, tiny.text[id]);
        state = state_after(f, state, tiny.text[id]);
        CHECK(state != LEFT);
    }
}

// ---- Target writer: the bytes go out as they come, but never a part of a character

static bool ends_inside_character(Bytes s) {    // by trying what could follow
    for (size_t n = 1; n <= 3 && n <= s.n; n++) {
        static const uint8_t nexts[] = {0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF};
        uint8_t whole[8];
        memcpy(whole, s.p + s.n - n, n);
        if (n > 1 && char_at(&tiny, rest(whole, n), 0).n == (int)n) continue;
        for (size_t length = n + 1; length <= 4; length++) {
            for (size_t i = 0; i < sizeof(nexts); i++) {
                memset(whole + n, 0x80, 4);
                whole[n] = nexts[i];
                if (char_at(&tiny, rest(whole, length), 0).n == (int)length) return true;
            }
        }
    }
    return false;
}

// The text after `from` with U+FFFD for half a character at its end
static void end_inside(Buffer *b, size_t from) {
    for (size_t n = 1; n <= 3 && n + from <= b->n; n++) {
        if (!ends_inside_character(rest(b->p + b->n - n, n))) continue;
        b->n -= n;
        buffer_add(b, bytes("\uFFFD"));
        return;
    }
}

// The first `stop` in the text, or its end
static size_t naive_find(Bytes text, Bytes stop) {
    for (size_t at = 0; stop.n && at + stop.n <= text.n; at++) {
        if (!memcmp(text.p + at, stop.p, stop.n)) return at;
    }
    return text.n;
}

// The text with U+FFFD for control characters and for bytes that are not UTF-8: one for all that begin
// a character which is cut
static Buffer naive_printable(Bytes s) {
    Buffer out = {0};
    for (size_t i = 0, n = 0; i < s.n; i += n) {
        Char c = char_at(&tiny, s, i);
        int next = i + 1 < s.n ? s.p[i + 1] : -1;
        bool shown = c.c == '\n' || c.c == '\t' || (c.c == '\r' && next == '\n') ||
                     (c.c >= 32 && c.c < 127) || (c.c >= 160 && c.c < 0x110000);
        shown &= (c.c < 0x202A || c.c > 0x202E) && (c.c < 0x2066 || c.c > 0x2069);
        n = c.n;
        for (size_t k = 3; k > 1 && c.c >= BAD_BYTE && n == 1; k--) {
            if (k <= s.n - i && ends_inside_character(rest(s.p + i, k)) && !ends_inside_character(rest(s.p + i + 1, k - 1)))
                n = k;
        }
        buffer_add(&out, shown ? rest(s.p + i, n) : bytes("\uFFFD"));
    }
    return out;
}

// What is drawn, in tokens that are cut anywhere: all of it or what is before the stop text comes out,
// and what may still become one, or a character, is all that waits.
static void fuzz_writer(Bytes in) {
    uint8_t flags = take_byte(&in);
    Bytes stop = take_up_to(&in, take_byte(&in) % 6);
    Writer w = {.chat = flags & 1, .terminal = flags & 2, .stop = stop};
    if (flags & 4) unsetenv("NO_COLOR");
    else setenv("NO_COLOR", "1", true);
    Buffer all = {0}, answer = {0};             // drawn; and of a chat without a terminal, the answer
    Tokenizer t = tiny;
    Engine e = {.mode = w.chat ? CHAT : GENERATE};
    Slot slot = {.engine = &e, .watched = SIZE_MAX / 2};
    Text drawn = {.max_ids = SIZE_MAX, .context = SIZE_MAX, .writer = &w, .slot = &slot,
                  .sampler = {.in_answer = (bool[3]){0}, .seen = (bool[3]){0}}};
    Bytes tokens[3];                            // a text, <think>, </think>
    uint8_t kind[3] = {0, flags & 8 ? SPECIAL : 0, flags & 8 ? SPECIAL : 0};
    bool going = true, began = true;
    size_t answer_begin = 0;                    // of the part since the last thinking
    terminals = flags & 16 ? 4 : 0;             // of stderr
    t.text = tokens;
    t.kind = kind;
    t.think = 1;
    t.end_think = 2;
    t.stop.n = 0;
    while (in.n && going) {
        size_t n = take_byte(&in) % 8;
        bool thought = w.thinking;
        int id = w.chat && n > 5 ? (int)n - 5 : 0;
        tokens[id] = take_up_to(&in, n);
        if (!kind[id]) buffer_add(&all, tokens[id]);
        going = add_id(&t, &drawn, id) == GOES_ON;
        CHECK(w.thinking == slot.thinking);
        CHECK(w.thinking == (id == 1 || (id == 0 && w.thinking)) || !going);
        if (w.chat) {
            for (size_t i = 0; !thought && id != 1 && !kind[id] && i < tokens[id].n; i++) {
                began |= tokens[id].p[i] != '\n';
                if (began) buffer_add(&answer, rest(tokens[id].p + i, 1));
            }
            Bytes part = bytes_from(bytes_of(&answer), answer_begin);
            CHECK(going == (naive_find(part, stop) == part.n));
            if (thought && !w.thinking) began = false, answer_begin = answer.n;
            if (id == 1) answer_begin = answer.n;
            if (!going) answer.n = answer_begin + naive_find(part, stop);
            continue;
        }
        Bytes text = bytes_of(&all);
        CHECK(going == (naive_find(text, stop) == text.n));
        if (!going) break;
        size_t waits = 0;
        for (size_t k = 1; k < stop.n && k <= text.n; k++) {
            if (!memcmp(text.p + text.n - k, stop.p, k)) waits = k;
        }
        bool inside = ends_inside_character(text) || (w.terminal && text.n && text.p[text.n - 1] == '\r');
        CHECK(w.held.n >= waits && w.held.n <= waits + 3);
        if (waits == 0) CHECK(inside == (w.held.n > 0));
        Buffer out = {0};
        if (w.terminal) out = naive_printable(rest(text.p, text.n - w.held.n));
        else buffer_add(&out, rest(text.p, text.n - w.held.n));
        CHECK(bytes_equal(rest(written, n_written), bytes_of(&out)));
    }
    if (!w.thinking) end_inside(&answer, answer_begin);
    writer_end(&w);
    CHECK(!w.thinking && w.held.n == 0);
    if (w.terminal) CHECK(harmless(written, n_written));
    if (w.chat && !w.terminal) buffer_add(&answer, bytes("\n"));
    if (w.chat && !w.terminal) CHECK(bytes_equal(rest(written, n_written), bytes_of(&answer)));
    if (w.chat) return;
    Bytes text = rest(all.p, naive_find(bytes_of(&all), stop));
    CHECK(w.cut == all.n - text.n);
    Buffer out = naive_printable(text);
    if (!w.terminal) out.n = 0, buffer_add(&out, text), end_inside(&out, 0);
    if (w.terminal) buffer_add(&out, bytes("\n"));
    CHECK(bytes_equal(rest(written, n_written), bytes_of(&out)));
}

// ---- Running them

static const struct Target { const char *name; void (*run)(Bytes); size_t longest; } targets[] = {
    {"model", fuzz_model, 192},     {"tokenizer", fuzz_tokenizer, 512}, {"text", fuzz_text, 256},
    {"chat", fuzz_chat, 512},       {"session", fuzz_session, 512},   {"list", fuzz_list, 200},
    {"kept", fuzz_kept, 64},        {"sample", fuzz_sample, 512},   {"writer", fuzz_writer, 256},
    {"form", fuzz_form, 256},
};
enum { N_TARGETS = sizeof(targets) / sizeof(*targets) };

static void run_input(const struct Target *target, const uint8_t *p, size_t n) {
    static Pass at_first;                       // exit() may have left another one there
    if (!at_first.batch) at_first = toy_pass;
    toy_pass = at_first;
    toy.context = 64;
    input = p;
    input_size = n;
    quiet = 2;
    interrupted = 0;
    n_written = reports = n_typed = terminals = pasting = 0;
    read_at_once = polls = must_succeed = 0;
    until_ctrl_c = 0;
    atomic_flag_clear(&dying);
    if (setjmp(left) == 0) {
        target->run((Bytes){p, n < target->longest ? n : target->longest});
    } else if (exit_status == 0) {
        CHECK(reports == 0);
    } else {                                    // one line that says what is wrong
        size_t length = strlen(said);
        CHECK(!must_succeed);
        CHECK((reports == 1 || terminals || !quiet) && (exit_status == 1 || exit_status == 2));
        CHECK(length > 8 && said[length - 1] == '\n');
        for (size_t i = 0; i + 1 < length; i++) CHECK((unsigned char)said[i] >= ' ');
        CHECK(harmless((const uint8_t *)said, length));
    }
    while (n_blocks > kept) free(blocks[--n_blocks]);
    table_clear();
    while (n_files) free(files[--n_files].p);
}

// Loads the tokenizer of FUZZ_MODEL, or the tiny one, and makes the toy model for it.
static void set_up(void) {
    static uint8_t file[1 << 25];
    char path[4096];
    const char *model = getenv("FUZZ_MODEL") ? getenv("FUZZ_MODEL") : "tests/tiny/tiny.bin";
    int32_t header[64], toy_header[64] = {0x616A6331, 1, 32, 32, 1, 2, 1, 0, 64, 16, 1, 32, [32] = 1};
    FILE *f = fopen(model, "rb");
    CHECK(f && fread(header, 256, 1, f) == 1);
    fclose(f);
    snprintf(path, sizeof(path), "%s.tokenizer", model);
    CHECK(f = fopen(path, "rb"));
    CHECK(setjmp(left) == 0);
    file_add("tokenizer", file, fread(file, 1, sizeof(file), f));
    fclose(f);
    tokenizer_load(&tiny, "tokenizer", toy_header[7] = header[7]);
    size_t matrices = (size_t)round_up(header[7], PANEL) * 32 + 2 * (32 + 16) * 32 + 3 * 32 * 32;
    size_t size = 256 + 4 * (3 * 32 + 2 * 16) + matrices + matrices / 32 * 4;
    uint64_t rng = 1;
    memcpy(file, toy_header, 256);
    for (size_t i = 64; i < size / 4; i++) ((float *)file)[i] = (float)random_next(&rng) * 0.1f;
    file_add("toy", file, size);
    toy_file = model_map(&toy, "toy", true);
    toy.context = 64;
    toy_pass = *(the_pass = pass_init(&toy, 16, 16, 8));
    kept = n_blocks;
    n_files = 0;                                // what they map stays
}

#ifdef LIBFUZZER
static const struct Target *target;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    for (int i = 0; i < N_TARGETS; i++) {
        if (getenv("FUZZ_TARGET") && !strcmp(getenv("FUZZ_TARGET"), targets[i].name))
            target = &targets[i];
    }
    set_up();
    CHECK(target);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    run_input(target, p, n);
    return 0;
}
#else
#define SEED(name, text) {name, text, sizeof(text) - 1}
static const struct { const char *target, *p; size_t n; } seeds[] = {
    // size and weights; magic, version, dim 32, hidden 32, layers 1, heads 2, kv 1, vocab 40, context, head_dim,
    // shared, group 32; no theta nor eps, scaled rope; panels
#define SHAPE "1cja\1\0\0\0\x20\0\0\0\x20\0\0\0\1\0\0\0\2\0\0\0\1\0\0\0\x28\0\0\0\x40\0\0\0\x10\0\0\0\1\0\0\0\x20\0\0\0"
#define ZEROS "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
#define NO_DELTA "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    SEED("model", "\0\1" SHAPE "\0\0\0\0\0\0\0\0\2\0\0\0\0\0\x80\x40" ZEROS ZEROS ZEROS ZEROS "\1\0\0\0" NO_DELTA "\1\4\0\2\7"),
    // the same with 4 experts, of which 2 run, and with four bits, but eight in wk and w2; in panels, and not
#define EXPERTS "\0\0\0\0\0\0\0\0\0\0\0\0\4\0\0\0\2\0\0\0\0\0\0\0\4\0\0\0\x22\0\0\0"
#define LEVELS "\x81\x90\xa0\xb0\xc0\xd0\xe0\xf0\0\x0a\x14\x1e\x28\x32\x3c\x7f"
    SEED("model", "\0\1" SHAPE ZEROS ZEROS EXPERTS LEVELS "\1\0\0\0" NO_DELTA "weights"),
    SEED("model", "\0\1" SHAPE ZEROS ZEROS EXPERTS LEVELS "\0\0\0\0" NO_DELTA "weights"),
    // two layers, the first one with a delta rule, gates, rope of half a head; then experts, one of them shared
#define DELTA_SHAPE "1cja\1\0\0\0\x20\0\0\0\x20\0\0\0\2\0\0\0\2\0\0\0\1\0\0\0\x28\0\0\0\x40\0\0\0\x10\0\0\0\1\0\0\0\x20\0\0\0"
#define DELTA_RULE "\2\0\0\0\1\0\0\0\1\0\0\0\x8\0\0\0\1\0\0\0"
    SEED("model", "\0\1" DELTA_SHAPE ZEROS ZEROS ZEROS ZEROS ZEROS "\1\0\0\0" DELTA_RULE "\0\0\0\0" "\1\4\0\2\7"),
    SEED("model", "\0\1" DELTA_SHAPE ZEROS ZEROS EXPERTS LEVELS "\0\0\0\0" DELTA_RULE "\1\0\0\0" "weights"),
    SEED("model", "\x48\1" "1cja\1\0\0\0\x40\0\0\0\x80\0\0\0\2\0\0\0\4\0\0\0\2\0\0\0\7\0\0\0\5\0\0\0"
                  "\x20\0\0\0\0\0\0\0\x40\0\0\0" "\0\0\x80\x47\0\0\0\0"),
    // five tokens, sections adde, head, stop, samp, deco, ccc, chat, then a text
    SEED("tokenizer", "\0\5\1\2" "\0\2th" "\1\3the" "\2\2he" "\6\3<a>" "\6\3<|>"
                      "\0\10\3\1\0\0\1\0\0\0" "\4\4\x65\0\0\0" "\6\4\x66\0\0\0"
                      "\7\14\0\0\0\x3f\0\0\0\x3f\5\0\0\0" "\2\14\0\3\0\0\1\3\0\0\xe6\0\0\0"
                      "\3\20\xe9\0\0\0\x65\0\0\0\1\3\0\0\1\0\0\0" "\xff" "the <a> e\xcc\x81 th"),
    SEED("tokenizer", "\0\0\1\2" "\10\60" "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
                      "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" "\5\4\x61\0\0\0" "\xff" "x"),
    // e and U+0301 and back; each e is two of them, and two are one
    SEED("tokenizer", "\0\0\1\2" "\2\14\0\3\0\0\1\3\0\0\xe6\0\0\0" "\13\14\001\003\000\000\001\003\000\000\001\000\000\000"
                      "\14\20\145\000\000\000\000\244\003\000\001\003\040\000\000\244\003\000"
                      "\15\10\351\000\040\140\000\224\001\000" "\xff" "the e\xcc\x81 \xc3\xa9"),
    SEED("tokenizer", "\0\0\1\2" "\13\14\145\000\000\000\145\000\000\000\001\000\000\000"
                      "\14\20\145\000\000\000\000\224\001\000\145\000\040\000\000\224\001\000"
                      "\15\10\145\000\240\014\000\224\001\000" "\xff" "eeee"),
    SEED("tokenizer", "\7\1\3\0\0\0\1\0\0\0\2\0\0\0\0\0\x80\xbf\1\0\0\0a\0\0\0\0"),
    SEED("text", "\3the old lighthouse keeper didn't say 1999-12-31!\r\n\t <|im_start|>x</think>  \n"),
    SEED("text", "\5e\xcc\x81\xcc\xa3 \xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8 \xea\xb0\x80\xe1\x86\xa8 "
                 "\xc5\xbf\xe2\x84\xab \xf0\x9d\x85\x9e \xed\xa0\x80 \xf4\x90\x80\x80 \xc0\xaf'\xc5\xbf"),
    SEED("text", "\4\xe0\xad\x87\xe0\xac\xbe\xe0\xb3\x86\xe0\xb3\x82\xe0\xb3\x95 "
                 "\xe0\xa4\xa8\xe0\xa4\xbc e\xcc\xa3\xcc\x81\xcc\x81"),
    SEED("chat", "\1" "\0be brief<|im_end|>\xff\1hi <think>\xff\2<think>\nx\n</think>\n\nyes\xff\1more"),
    SEED("chat", "\2<a>\xff<b>\xff<|im_start|>s\n\xff<|im_end|>\n\xff<|im_start|>u\n\xff<|im_end|>\xff"
                 "A:\xff\n\xff<think>\xff</think>\xff<|im_start|>a\n\xff</think>\xff\n \xff\1q\xff\2a</think>\n b\xff\1r"),
    SEED("chat", "\1" "\1q\xff\2<think>\nx\n</think>\n\nye"),
    SEED("chat", "\2\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xffnk>\xff\xff\2<think>"),
    SEED("chat", "\2\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xffx\xff\xff\2x"),
    SEED("session", "\0m.bin\0-m\0chat\0-t\0" "0.7\0-y\0system\0-s\0" "7\0\0first\nsecond\n\nthird"),
    SEED("session", "\1m.bin\0-i\0text\0-f\0f\0-r\0" "1\0-k\0" "20\0-p\0" ".9\0-a\0" "1\0-n\0" "2\0\0"),
    SEED("session", "\0m.bin\0-m\0perplexity\0-b\0" "3\0-c\0" "9\0-j\0" "1\0-v\0\0some text of words"),
    SEED("session", "\3m.bin\0\0typed \\\nlines\n"),
    SEED("session", "\2m.bin\0-m\0generate\0-f\0-\0\0abc"),
    SEED("session", "\6m.bin\0-m\0generate\0-f\0-\0-n\0" "2\0--version\0\0abc"),
    SEED("session", "\2m.bin\0-m\0tokenize\0-i\0<|im_end|>\0\0"),
    SEED("session", "\2m.bin\0-m\0tokenize\0-v\0-i\0\xc2\x9b\033 e\0\0"),
    SEED("session", "\3m.bin\0-x\0e\0-e\0" "1.2\0\0hi\n/retry\n/file f what?\n/clear\n/help\nyes\n/bye\n"),
    SEED("session", "\3m.bin\0-n\0-1\0-y\0s\0\0one\n/file \"f\"\n/file e\n/file g x\nab\3\n/retry\n\4"),
    SEED("session", "\x4bm.bin\0\0two\nlines\n\n/clear\n/quit\nx\\\ny\n\3\3exit\n"),
    SEED("session", "\x20m.bin\0-m\0chat\0-x\0" "a\0-e\0" "2\0\0one\n/bye\ntwo"),
    SEED("session", "\0m.bin\0-m\0generate\0-x\0\n\0-i\0go\0\0"),
    SEED("session", "\2m.bin\0-l\0-\0-i\0x\0-n\0" "2\0\0one\ntwo\n"),
    SEED("session", "\2m.bin\0-o\0yes|no|yes!\0-i\0x\0-r\0" "4\0-m\0chat\0\0"),
    SEED("list", "\0\x12\x40\0" "Hello\nWhat is 3 + 4?\n\nthe old lighthouse\nthe old light\nthe old lightship"),
    SEED("list", "\1\x35\x88\x08" "a\r\n\0b\xff\n\n x x x x x x x x x x x x x x x x x x x x\nab\nab"),
    SEED("list", "\2\xa1\xc1\xc8" "one text\none\none text more\n\xe7\x81\xaf"),
    SEED("list", "\3\x24\x7a\x18" "the keeper didn't like it\nthe keeper\n\nthe old lighthouse keeper, and so on and on"),
    SEED("list", "\x44\x25\x0a\x10" "1999-12-31\n<|im_end|> x\n"),
    SEED("list", "\x83\x65\x52\x48" "Hello\n\"quoted\\\"\ttext\n\xf0\x9f\x99\x82\nHello"),
    SEED("list", "\x82\x02\x40\x28" "[{\"role\": \"user\", \"content\": \"Hello\"}]\n[{\"role\":\"system\",\"content\":\"x\"},"
                 "{\"role\":\"user\",\"content\":\"\\ud83d\\ude42\\n\"}]\n\"\\ud83d\"\n \"a\" \n"),
    SEED("list", "\xb9\x11\x80\x78" "[{\"role\": \"user\", \"content\": \"a\"}, {\"content\": \"<think>\\n</think> b\", \"role\": "
                 "\"assistant\"}, {\"x\": [1, -2.5e3, 0.1E+7, {\"y\": null}], \"role\": \"user\", \"content\": \"c\"}]\n\"d\""),
    // answers until the context is full: of two blocks to their end, and of one position more, in a
    // pool that only one of them fits into; with one row a pass, and Ctrl-C
    SEED("list", "\1\x35\xc0\x40" "a\nab\nabc\n\nab\nabcd\na b c d\nabc\nab\nabcde"),
    SEED("list", "\1\x2f\xc0\x88" "the old lighthouse\nthe old light\nthe old\nthe old lighthouse keeper\nthe"),
    SEED("list", "\x42\x35\x08\x48" "a b c\na b c\na b c d\na"),
    // the last one ends before the others, whose answers then need its blocks
    SEED("list", "\1\x23\xf8\0" "a\nb\n x x x x x x x x x x x x x x x x x x x x x x x x x"),
    // the younger one needs the block that is not there
    SEED("list", "\1\x23\xc8\0" "a\n x x x x x x x x x x x x x x"),
    // more lines ahead than may wait for the first
    SEED("list", "\x83\x65\xe0\x07" "Hello\nthe old\nthe old light"),
    SEED("list", "\x80\x2f\xa0\x40" "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
         "{\"type\":\"text\",\"text\":\"\"}]}]\n[\na,b\n{\"n\":1,\"text\":\"a\",\"body\":{}}"),
    SEED("list", "\xa0\x2f\xa0\x40" "[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":"
         "\"<think>\\na</think>b\"}]\n[{\"role\":\"assistant\",\"content\":\"\"}]"),
    SEED("list", "\x82\x2f\xa0\x4f" "\"Hello\"\n\"the old\"\nHello\n\"a\""),
    // given answers, alone and behind thinking, which has little room
    SEED("list", "\0\x12\x40\x10" "Hello\nthe old lighthouse\nthe old light\nthe old lightship\n\nthe old"),
    SEED("list", "\x60\x15\xc8\x30" "Hello\nthe old lighthouse keeper, and so on and on\nHello\na"),
    SEED("list", "\1\x2f\x78\xd8" "the old\nthe\n\nthe old lighthouse\nthe old"),
    // lines that go on with other lines' given answers, whose blocks they share
    SEED("list", "\1\x23\x78\x11" "the old\nthe old keeper, and so on, and on and on\nthe old\nthe old keeper, and so on, and on and on or"),
    SEED("list", "\1\x30\x48\x11" "the old\nthe old keeper, and so on, and on and on\nthe old keeper, and so\nthe old keeper, and so on, and on and on or not"),
    SEED("kept", "\0\0\0" "the old lighthouse keeper"),
    SEED("kept", "\0\1\0\x20\3\1the old lighthouse keeper"),
    SEED("kept", "\x28\0\x80the old lighthouse keeper"),
    SEED("kept", "\1\2\0\x28\0\xff\x30\0\1the old lighthouse keeper"),
    SEED("kept", "\x1f\1\0\0\4\7the old lighthouse keeper"),
    SEED("kept", "\6\0\0the old lighthouse keeper"),
    SEED("sample", "\0\x46\5\xf0\1\x80\x90\xa0\x70\x80\x81\xa1\xa1\x40"),
    SEED("sample", "\6\x46\5\xf0\1\0\0\x80\x7f\0\0\x80\x3f\0\0\x80\x3f"),
    SEED("form", "(?:a|b[^c-f\\d]*){2,5}\\.x?\\w+\\s\0\1\2\3\4\5\6\7\10"),
    SEED("form", "[\\u00e0-\\uffef]{3}|\\(\\)|.*[^\\]-]\0\1\2\3\4\5\6"),
    SEED("form", "((((((a{3}){3})*){3})+)?)|^|$\0\1\2\3"),
    SEED("form", "^\\{\"n\": ?\"([^\"\\\\\\x00-\\x1f]|\\\\[\"\\\\n])*\"(, )?[\\S\\n]\\}$\0\0\0\1\1\2\2\3\3\4\4"),
    SEED("form", "[\\D\\W]{0,40}([\\s\\S]{0,9}[^a]{0,9}){9}\0\377\377\1\2\3\4\5\6"),
    SEED("form", "\xe6\x97\xa5|[\xf0\x9f\x98\x80-\xf0\x9f\x98\x8e]{2}\\x41\0\2\1\3\1"),
    SEED("session", "\0m.bin\0-g\0[a-z ]{2,9}|\\d\0-i\0Hello\0-n\0002\0"),
    SEED("list", "\1\x2f\xc0\x04" "the old\nthe\nthe old lighthouse\nthe old"),
    SEED("list", "\x20\x2c\xc0\x0c" "the old\nthe\nthe old lighthouse\nthe old"),
    SEED("writer", "\7\0\3<a>\6think>\2b\n\7/think>\2\nc"),
    SEED("writer", "\0\0\1\xf0\2\x9f\x99\1\x82\3\xe2\x82Z\2\xed\xa0\1\x80\1\xc3\0\1\xa9"),
    SEED("writer", "\2\2\n\n\3a\r\n\2b\r\1\n\3\xc2\x9b\033\2\n\nc"),
    SEED("writer", "\0\4aaab\3aaa\2aa\3aba\1c"),
    SEED("writer", "\1\3abc\1a\6think>\2bc\7/think>\3\n\na\1b\2cd"),
};

static uint64_t random_state;

static size_t below(size_t n) { return (size_t)(random_next(&random_state) * (double)n); }

// Changes an input in one of the usual ways; returns its new size.
static size_t mutate(uint8_t *p, size_t n, size_t most) {
    static const uint8_t liked[] = {0, 1, 0x7F, 0x80, 0xFF, 0x20, '\n', '%', '-', '<', 0xC3, 0xED};
    size_t at = below(n + 1), count = 1 + below(8), from = below(n + 1);
    if (n == 0 || below(8) == 0) {              // insert
        if (n + count > most) return n;
        memmove(p + at + count, p + at, n - at);
        for (size_t i = at; i < at + count; i++) p[i] = liked[below(sizeof(liked))];
        return n + count;
    }
    at = below(n);
    switch (below(6)) {
    case 0: p[at] ^= 1 << below(8); break;
    case 1: p[at] = (uint8_t)below(256); break;
    case 2: p[at] = liked[below(sizeof(liked))]; break;
    case 3: p[at] += (uint8_t)below(9) - 4; break;
    case 4:                                     // delete
        count = count < n - at ? count : n - at;
        memmove(p + at, p + at + count, n - at - count);
        return n - count;
    case 5:                                     // copy
        count = count < n - at ? count : n - at;
        count = count < n - from ? count : n - from;
        memmove(p + at, p + from, count);
    }
    return n;
}

static long fuzz(const struct Target *target, double seconds, long most) {
    static uint8_t p[4096];
    long runs = 0;
    for (double end = now() + seconds; now() < end && runs < most;) {
        size_t i = below(sizeof(seeds) / sizeof(*seeds));
        if (strcmp(seeds[i].target, target->name)) continue;
        size_t n = seeds[i].n;
        memcpy(p, seeds[i].p, n);
        for (int k = 0; k < 20; k++, runs++) {  // further and further away from the seed
            run_input(target, p, n);
            n = mutate(p, n, target->longest);
        }
    }
    return runs;
}

int main(int argc, char **argv) {
    const struct Target *target = NULL;
    char path[4096], *end;
    for (int i = 0; i < N_TARGETS && argc > 1; i++) {
        if (!strcmp(argv[1], targets[i].name)) target = &targets[i];
    }
    if (argc == 3 && !strcmp(argv[1], "-w")) {
        for (size_t i = 0; i < sizeof(seeds) / sizeof(*seeds); i++) {
            snprintf(path, sizeof(path), "%s/%s-%zu", argv[2], seeds[i].target, i);
            FILE *f = fopen(path, "wb");
            CHECK(f && fwrite(seeds[i].p, 1, seeds[i].n, f) == seeds[i].n && fclose(f) == 0);
        }
        return 0;
    }
    if (!target || argc < 3) {
        fprintf(stderr, "usage: tests/fuzz TARGET SECONDS [SEED [INPUTS]], TARGET FILE..., "
                        "or -w DIR\n");
        return 2;
    }
    set_up();
    double seconds = strtod(argv[2], &end);
    if (*end == 0) {
        random_state = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
        long most = argc > 4 ? strtol(argv[4], NULL, 10) : LONG_MAX;
        printf("%s: %ld inputs, nothing broke\n", target->name, fuzz(target, seconds, most));
        return 0;
    }
    for (int i = 2; i < argc; i++) {
        static uint8_t p[1 << 20];
        FILE *f = fopen(argv[i], "rb");
        CHECK(f);
        run_input(target, p, fread(p, 1, sizeof(p), f));
        fclose(f);
    }
    return 0;
}
#endif
