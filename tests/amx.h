// Intel's matrix unit AMX in C, for CPUs that lack it: `-include tests/amx.h` puts these functions
// in the place of the intrinsics that qwen3.c uses. They end the program where AMX would fault
// because of a shape.
// As in Intel's Software Developer's Manual, volume 2, TDPBSSD, TILELOADD and LDTILECFG.

#define _GNU_SOURCE  // as qwen3.c, before the first header
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    uint8_t palette, unused[15];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} AmxConfig;

static _Thread_local AmxConfig amx_config;
static _Thread_local int8_t amx_tile[8][16][64];

static inline void amx_must(int condition) {
    if (!condition) abort();
}

static inline void amx_loadconfig(const void *config) {
    memcpy(&amx_config, config, sizeof(amx_config));
    memset(amx_tile, 0, sizeof(amx_tile));
    amx_must(amx_config.palette == 1);
    for (int i = 0; i < 16; i++) {
        const int rows = amx_config.rows[i], bytes = amx_config.row_bytes[i];
        amx_must((rows == 0) == (bytes == 0) && rows <= (i < 8 ? 16 : 0) && bytes <= 64);
    }
}

static inline void amx_zero(int to) {
    amx_must(amx_config.rows[to] > 0);
    memset(amx_tile[to], 0, sizeof(amx_tile[to]));
}

static inline void amx_loadd(int to, const void *from, int64_t stride) {
    amx_zero(to);
    for (int i = 0; i < amx_config.rows[to]; i++) {
        memcpy(amx_tile[to][i], (const char *)from + i * stride, amx_config.row_bytes[to]);
    }
}

static inline void amx_stored(int from, void *to, int64_t stride) {
    amx_must(amx_config.rows[from] > 0);
    for (int i = 0; i < amx_config.rows[from]; i++) {
        memcpy((char *)to + i * stride, amx_tile[from][i], amx_config.row_bytes[from]);
    }
}

// c (m, n) of int32 += a (m, 4k) of int8 times b, whose row j, column i holds bytes 4j .. 4j + 3
// of the matrix's column i
static inline void amx_dpbssd(int c, int a, int b) {
    const AmxConfig *config = &amx_config;
    const int m = config->rows[c], n = config->row_bytes[c] / 4, k = config->rows[b];
    amx_must(m > 0 && config->rows[a] == m && config->row_bytes[a] == 4 * k &&
             config->row_bytes[b] == 4 * n && c != a && c != b && a != b);
    for (int row = 0; row < m; row++) {
        int32_t sum[16];
        memcpy(sum, amx_tile[c][row], 4 * n);
        for (int j = 0; j < k; j++) {
            for (int i = 0; i < n; i++) {
                for (int part = 0; part < 4; part++) {
                    sum[i] += amx_tile[a][row][4 * j + part] * amx_tile[b][j][4 * i + part];
                }
            }
        }
        memcpy(amx_tile[c][row], sum, 4 * n);
    }
}

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig amx_loadconfig
#define _tile_zero amx_zero
#define _tile_loadd amx_loadd
#define _tile_stored amx_stored
#define _tile_dpbssd amx_dpbssd
#define syscall(...) 0  // Linux lets every process use this AMX
