// What these programs have at their end goes with them.
const char *__asan_default_options(void) { return "detect_leaks=0"; }

// Reads records "KIND BYTES\n" + that many bytes + an optional newline from stdin, as the test
// programs take them.
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
