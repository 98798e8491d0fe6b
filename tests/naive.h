// What test.c, fuzz.c and bench.c share: texts without an engine, and the engine's promises, asserted

static bool same_ids(const Ids *a, const Ids *b) {
    return a->n == b->n && (a->n == 0 || memcmp(a->p, b->p, a->n * sizeof(int)) == 0);
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
        p->rows[t] = (Row){.token = tokens[t], .pos = pos + t, .blocks = blocks, .needed = t >= n - needed,
                           .state = p->m->state.delta};
    }
    return forward_rows(p, n);
}

#ifdef CHECKED
// What ran at each position of the caches of the last engines, as a hash of the text's ids up to there
static struct { const Pass *pass; size_t n; uint64_t *hash; } ran[4];

static uint64_t next_hash(uint64_t hash, int id) { return (hash + id + 1) * 0x9E3779B97F4A7C15u; }

static uint64_t *hash_at(const Engine *e, int block, size_t pos) {
    static int last;
    const size_t len = e->pass->block_len, n = e->pass->n_blocks * len;
    int i = 0;
    while (i < 4 && (ran[i].pass != e->pass || ran[i].n != n)) i++;
    if (i == 4) {
        i = last = (last + 1) % 4;
        free(ran[i].hash);
        ran[i].pass = e->pass, ran[i].n = n, ran[i].hash = calloc(n, sizeof(*ran[i].hash));
    }
    return &ran[i].hash[block * len + pos % len];
}

static size_t passes_ran;  // of all engines

// What ran into each state, as a hash of the ids
static struct { const float *state; uint64_t hash; } states[200];

static uint64_t *state_of(const float *state) {
    static int last;  // an engine has fewer: of those before, the oldest makes room
    int i = 0;
    while (i < 200 && states[i].state != state) i++;
    if (i == 200) {
        i = last = (last + 1) % 200;
        states[i].state = state;
        states[i].hash = 0;
    }
    return &states[i].hash;
}

static void check_state_copy(float *to, const float *from) { *state_of(to) = *state_of(from); }

// What a Kept has was read from FILE (-K), and counts as run.
static void check_loaded(const Engine *e, const Kept *kept) {
    uint64_t hash = 0;
    for (size_t pos = 0; pos < kept->n; pos++) {
        hash = next_hash(hash, kept->ids[pos]);
        *hash_at(e, kept->blocks.p[pos / e->pass->block_len], pos) = hash;
    }
    if (has_delta(e)) *state_of(kept->state) = hash;
}

// The id that once came after these ids
static struct { uint64_t ids; int next; } after[1 << 16];

// Asserts the invariant before n rows run: each text finds in its blocks what its ids before them have
// left there, and each row is written into a block with one user.
static void check_rows(const Engine *e, int n) {
    passes_ran++;
    const Row *row = e->pass->rows, *end = row + n;
    int unused = e->pass->n_blocks;
    for (int i = 0; i < e->n_kept; i++) {
        const Kept *kept = &e->kept[i];
        uint64_t hash = 0;
        for (size_t pos = 0; pos < kept->n && !kept->maker; pos++) {
            hash = next_hash(hash, kept->ids[pos]);
            if (*hash_at(e, kept->blocks.p[pos / e->pass->block_len], pos) != hash)
                die("Kept %d: position %zu is another's", i, pos);
        }
        if (kept->n && !kept->maker && has_delta(e) && *state_of(kept->state) != hash) die("Kept %d: its state is another's", i);
    }
    for (int i = 0; i < e->pass->n_blocks; i++) unused -= e->users[i] > 0;
    if (unused != e->n_unused) die("blocks: %d are unused, not %d", unused, e->n_unused);
    for (int i = 0; i < e->n_running; i++) {
        const Text *t = e->order[i];
        uint64_t hash = 0;  // of the ids up to pos
        for (size_t pos = 0; pos < t->n_run || (row < end && row->text == t); pos++) {
            const int block = t->slot->own.blocks.p[pos / e->pass->block_len];
            uint64_t *there = hash_at(e, block, pos);
            if (pos == t->n_run && pos > 0 && has_delta(e) && *state_of(t->slot->own.state) != hash)
                die("the state after %zu ids is another's", pos);
            hash = next_hash(hash, t->ids.p[pos]);
            if (pos + 1 < t->ids.n) after[hash >> 48].ids = hash, after[hash >> 48].next = t->ids.p[pos + 1];
            if (pos >= t->n_run && has_delta(e) && row->saved) *state_of(row->saved) = hash;
            if (pos < t->n_run ? *there != hash : (e->users[block] != 1 || row++->pos != (int)pos))
                die("block %d of %d users: position %zu is another's", block, e->users[block], pos);
            *there = hash;
        }
        if (has_delta(e)) *state_of(t->slot->own.state) = hash;
    }
    if (row != end) die("rows: %d belong to no text that runs", (int)(end - row));
}

// A text goes back to n ids or less, and starts with n or less: with `gives_up`, the state of random
// numbers, to any number.
static uint64_t gives_up;
static size_t give_up(size_t n) {
    if (!gives_up || n == 0) return n;
    const double drawn = random_next(&gives_up);
    return drawn < 0.25 ? n : drawn < 0.5 ? n - 1 : drawn < 0.625 ? 0 : (size_t)(random_next(&gives_up) * n);
}

// Guesses `count` ids after a text: with `guesses`, the state of random numbers, first some that once
// came after its ids, so most of them right ones, and then any.
static uint64_t guesses;
static size_t guess_any(Engine *e, const Text *t, int count, size_t from) {
    const size_t n = t->ids.n;
    uint64_t hash = 0;
    if (!guesses || random_next(&guesses) < 0.1) return from;
    const int known = (int)(random_next(&guesses) * 1.5 * (count + 1));
    e->credit = MOST_CREDIT;
    for (size_t pos = 0; pos < n; pos++) hash = next_hash(hash, t->ids.p[pos]);
    for (int i = 0; i < count; i++) {
        const int any = (int)(random_next(&guesses) * e->tokenizer.vocab_size);
        t->ids.p[n + i] = i < known && after[hash >> 48].ids == hash ? after[hash >> 48].next : any;
        hash = next_hash(hash, t->ids.p[n + i]);
    }
    return n;
}

static void check_copy(const Engine *e, int to, int from) {
    memmove(hash_at(e, to, 0), hash_at(e, from, 0), e->pass->block_len * sizeof(uint64_t));
}
#endif
