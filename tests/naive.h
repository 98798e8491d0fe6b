// The slow and obvious way to what qwen3.c does fast, for test.c and fuzz.c.

static bool same_ids(const Ids *a, const Ids *b) {
    return a->n == b->n && (a->n == 0 || memcmp(a->p, b->p, a->n * sizeof(int)) == 0);
}

// Byte-pair encoding of a piece by its definition: the pair of neighbours with the highest priority, the
// leftmost of equals, becomes one token, until no pair is a token.
static void merge_naively(const Tokenizer *t, Bytes s, Ids *out) {
    enum { LONGEST = 300 };
    size_t at[LONGEST + 1], n = s.n;  // where the parts begin, and the end
    if (n > LONGEST) die("merge_naively: expected at most %d bytes, found %zu", LONGEST, n);
    for (size_t i = 0; i <= n; i++) at[i] = i;
    for (;;) {
        size_t best = n;
        float priority = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            int id = token_find(t, (Bytes){s.p + at[i], at[i + 2] - at[i]}, false);
            if (id >= 0 && (best == n || t->priority[id] > priority)) best = i, priority = t->priority[id];
        }
        if (best == n) break;
        memmove(at + best + 1, at + best + 2, (--n - best) * sizeof(*at));
    }
    for (size_t i = 0; i < n; i++) ids_add(out, token_find(t, (Bytes){s.p + at[i], at[i + 1] - at[i]}, false));
}

// A text alone in the cache has its blocks in their order.
static int *whole_cache(const Pass *p) {
    int *blocks = alloc(p->n_blocks, sizeof(int), "a test");
    for (int i = 0; i < p->n_blocks; i++) blocks[i] = i;
    return blocks;
}

// Runs n tokens of one text from position pos on. The last `needed` of them are needed.
static bool forward_text(Pass *p, const int *blocks, const int *tokens, int n, int pos, int needed) {
    for (int t = 0; t < n; t++) {
        p->rows[t] = (Row){.token = tokens[t], .pos = pos + t, .blocks = blocks, .needed = t >= n - needed};
    }
    return forward_rows(p, n);
}
