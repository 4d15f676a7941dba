/*
The decoder's operators on a CPU, in fp32, or with weights of 8-bit integers: what kernels.py is to
a GPU. ops/cpu.py builds this file and calls it.

A step is a program, a list of `Op`, recorded once: from top to bottom, each from the rows of its x
to those of its y. An operator is cut into tasks, which a pool of threads shares; the next one
starts when all tasks of the one before are done.

    op        embed   add_norm   linear     heads    attend    linear    add_norm ..
    tasks     a row   a row      rows x     a row    a row,    ..
                                 columns             a KV head
    thread 0  ####    ##         ########   ##       #####     ######
    thread 1  ####    ##         #######    ##       ######    #####

Whatever else is in the batch, and however many threads there are, a row gets the same result to the
last bit: no sum depends on where a task begins or on how many rows it has. Of integers all sums are
exact: weights of 8 bits times activations of 16 bits, as large as 32 bits can add up.

Letters: R rows (tokens of the step), N outputs, K inputs, H query heads, Hk KV heads, D head size,
S block size, M blocks per table.
*/

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    int64_t kind;             // place in OPERATORS
    const void *x;            // what it reads, [R, K] fp32; of integers, int16
    void *y;                  // what it writes
    const float *x_scale;     // [R] of integers, else NULL
    const void *weight;       // [N, K] fp32; of integers, int8
    const float *scale;       // [N] of integers, else NULL
    const float *bias;        // [N] or NULL
    const float *delta;       // add_norm: [R, K] or NULL
    const float *k_norm;      // heads: [D] or NULL, as `weight` for q
    const float *rotation;    // heads: [R, D] or NULL, cosines and sines
    float *kv;                // one layer's pool [2, num_blocks + 1, Hk, S, D]
    const int64_t *tokens;    // [R]
    const int64_t *positions; // [R]
    const int64_t *slots;     // [R] where K and V of the row go
    const int64_t *requests;  // [R] whose block table
    const int32_t *tables;    // [B, M] block tables
    int64_t N, K, H, Hk, D, S, M, k_to_v, window, panel, activation, gated, rms;
    double factor; // embed's or attention's scale, the norms' epsilon, the integers' largest
    double cap;    // soft cap of scores or logits; 0: none
} Op;

// -------------------------------------------------------------------------------------------------
// Vectors and functions

#if defined(__AVX512F__)
enum { LANES = 16, SUMS = 24, COLS = 4 }; // of a vector; vectors of sums that stay in registers
#elif defined(__AVX__)
enum { LANES = 8, SUMS = 12, COLS = 2 };
#else
enum { LANES = 4, SUMS = 12, COLS = 2 };
#endif
enum { ROWS = 6, PANEL = 16 }; // of a tile; outputs whose weights are kept together

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE Vector load(const float *x) { return *(const Unaligned *)x; }

INLINE void store(float *x, Vector v) { *(Unaligned *)x = v; }

INLINE float sum_of(Vector v)
{
    float x[LANES];
    memcpy(x, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] += x[i + half];
    return x[0];
}

// Sum of a[k] b[k].
INLINE float dot(const float *a, const float *b, int64_t K)
{
    Vector sum = {0};
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES)
        sum += load(a + k) * load(b + k);
    float total = sum_of(sum);
    for (; k < K; k++)
        total += a[k] * b[k];
    return total;
}

// e^x, to 2 units of the last place: 2^n times a polynomial of what is left, |left| < ln(2) / 2.
INLINE float exponential(float x)
{
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    const float round = 12582912.0f; // 1.5 * 2^23: adding it leaves a whole number
    float n = x * 1.44269504f + round;
    int32_t bits;
    memcpy(&bits, &n, 4);
    bits = (bits - 0x4b400000 + 127) << 23; // 2^n
    float power;
    memcpy(&power, &bits, 4);
    n -= round;
    float left = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * left + 1.3981999507e-3f;
    y = y * left + 8.3334519073e-3f;
    y = y * left + 4.1665795894e-2f;
    y = y * left + 1.6666665459e-1f;
    y = y * left + 5.0000001201e-1f;
    return power * (y * left * left + left + 1.0f);
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

INLINE float capped(float x, float cap) { return cap * (2.0f * sigmoid(2.0f * x / cap) - 1.0f); }

enum { NONE, GELU_NEW, GELU, RELU, RELU2, SILU }; // model.ACTIVATIONS, in its order

// activation(x) of n numbers, in place.
static void activate(float *x, int64_t n, int64_t activation)
{
    switch (activation) {
    case GELU_NEW: // 0.5 (1 + tanh(u)) is sigmoid(2 u)
        for (int64_t i = 0; i < n; i++)
            x[i] *= sigmoid(1.5957691216f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
        break;
    case GELU:
        for (int64_t i = 0; i < n; i++)
            x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
        break;
    case RELU:
        for (int64_t i = 0; i < n; i++)
            x[i] = x[i] > 0 ? x[i] : 0;
        break;
    case RELU2:
        for (int64_t i = 0; i < n; i++)
            x[i] = x[i] > 0 ? x[i] * x[i] : 0;
        break;
    case SILU:
        for (int64_t i = 0; i < n; i++)
            x[i] *= sigmoid(x[i]);
    }
}

// -------------------------------------------------------------------------------------------------
// Operators of a row

// y [R, K]: the token's embedding times `factor`, and that of its position where there are such.
static void embed(const Op *op, int64_t r)
{
    float *y = (float *)op->y + r * op->K;
    int64_t token = op->tokens[r], panel = op->panel;
    int64_t at = token / panel * panel * op->K + token % panel;
    for (int64_t k = 0; k < op->K; k++)
        if (op->scale)
            y[k] = ((const int8_t *)op->weight)[at + k] * op->scale[token];
        else
            y[k] = ((const float *)op->weight)[at + k * panel];
    for (int64_t k = 0; k < op->K; k++)
        y[k] *= (float)op->factor;
    if (op->bias)
        for (int64_t k = 0; k < op->K; k++)
            y[k] += op->bias[op->positions[r] * op->K + k];
}

// y [R, D]: cosines and sines of the position times each of the D / 2 frequencies, `weight`.
static void rotation(const Op *op, int64_t r)
{
    float *y = (float *)op->y + r * op->D;
    for (int64_t i = 0; i < op->D / 2; i++) {
        float angle = (float)op->positions[r] * ((const float *)op->weight)[i];
        y[i] = cosf(angle);
        y[i + op->D / 2] = sinf(angle);
    }
}

// RMSNorm of K numbers, in place or to y.
static void rms_norm(const float *x, float *y, const float *weight, int64_t K, float epsilon)
{
    float shrink = 1.0f / sqrtf(dot(x, x, K) / (float)K + epsilon);
    for (int64_t k = 0; k < K; k++)
        y[k] = x[k] * shrink * weight[k];
}

// x += delta, and y = norm(x); y may be delta itself.
static void add_norm(const Op *op, int64_t r)
{
    int64_t K = op->K;
    float *x = (float *)op->x + r * K, *y = (float *)op->y + r * K;
    const float *weight = op->weight;
    if (op->delta)
        for (int64_t k = 0; k < K; k++)
            x[k] += op->delta[r * K + k];
    if (op->rms) {
        rms_norm(x, y, weight, K, (float)op->factor);
        return;
    }
    double sum = 0;
    for (int64_t k = 0; k < K; k++)
        sum += x[k];
    float mean = (float)(sum / (double)K);
    for (int64_t k = 0; k < K; k++)
        y[k] = x[k] - mean;
    float shrink = 1.0f / sqrtf(dot(y, y, K) / (float)K + (float)op->factor);
    for (int64_t k = 0; k < K; k++)
        y[k] = y[k] * shrink * weight[k] + (op->bias ? op->bias[k] : 0.0f);
}

// x [R, K] as integers y of at most `factor`, and x_scale [R], the size of a step.
static void round_row(const Op *op, int64_t r)
{
    const float *x = (const float *)op->x + r * op->K;
    int16_t *y = (int16_t *)op->y + r * op->K;
    float largest = 1e-30f;
    for (int64_t k = 0; k < op->K; k++)
        largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
    float steps = (float)op->factor / largest;
    for (int64_t k = 0; k < op->K; k++)
        y[k] = (int16_t)rintf(x[k] * steps);
    ((float *)op->x_scale)[r] = largest / (float)op->factor;
}

// Numbers i and i + D / 2 of a head, turned by the row's cosines and sines.
static void rotate(float *head, const float *cosines, int64_t D)
{
    const float *sines = cosines + D / 2;
    for (int64_t i = 0; i < D / 2; i++) {
        float first = head[i], second = head[i + D / 2];
        head[i] = first * cosines[i] - second * sines[i];
        head[i + D / 2] = second * cosines[i] + first * sines[i];
    }
}

// Where K of a slot of KV head 0 is in a layer's pool; of the next head, S * D further on.
INLINE int64_t pool_offset(const Op *op, int64_t slot)
{
    return (slot / op->S * op->Hk * op->S + slot % op->S) * op->D;
}

// Queries, keys and values x [R, (H + 2 Hk) D]: normalised and rotated in place where the model
// does so, keys and values stored in the pool.
static void heads(const Op *op, int64_t r)
{
    int64_t D = op->D, H = op->H, Hk = op->Hk;
    float *x = (float *)op->x + r * (H + 2 * Hk) * D;
    for (int64_t h = 0; h < H + Hk; h++) {
        const float *weight = h < H ? op->weight : op->k_norm;
        if (weight)
            rms_norm(x + h * D, x + h * D, weight, D, (float)op->factor);
        if (op->rotation)
            rotate(x + h * D, op->rotation + r * D, D);
    }
    float *kv = op->kv + pool_offset(op, op->slots[r]);
    for (int64_t h = 0; h < Hk; h++) {
        memcpy(kv + h * op->S * D, x + (H + h) * D, D * sizeof *x);
        memcpy(kv + op->k_to_v + h * op->S * D, x + (H + Hk + h) * D, D * sizeof *x);
    }
}

// -------------------------------------------------------------------------------------------------
// Attention

enum { TILE = 32 }; // keys at once

// y [D] = y * shrink + the sum of weight[j] v[j] over n rows v [n, D].
INLINE void mix(float *y, float shrink, const float *weight, const float *v, int64_t n, int64_t D)
{
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES) {
        Vector sum = load(y + d) * shrink;
        for (int64_t j = 0; j < n; j++)
            sum += weight[j] * load(v + j * D + d);
        store(y + d, sum);
    }
    for (; d < D; d++) {
        float sum = y[d] * shrink;
        for (int64_t j = 0; j < n; j++)
            sum += weight[j] * v[j * D + d];
        y[d] = sum;
    }
}

typedef struct {
    float top;   // the largest score so far
    float total; // the sum of the weights so far
} Softmax;

// Online softmax (Milakov and Gimelshein 2018): n more keys and values [n, D], n <= TILE, of the
// query q [D]; y [D] is the weighted sum of values so far.
static void attend_tile(
    const Op *op, const float *q, const float *k, const float *v, int64_t n, float *y, Softmax *state)
{
    float weight[TILE];
    float top = state->top;
    for (int64_t j = 0; j < n; j++) {
        weight[j] = dot(q, k + j * op->D, op->D) * (float)op->factor;
        if (op->cap)
            weight[j] = capped(weight[j], (float)op->cap);
        top = weight[j] > top ? weight[j] : top;
    }
    float shrink = exponential(state->top - top);
    for (int64_t j = 0; j < n; j++)
        weight[j] = exponential(weight[j] - top);
    float total = state->total * shrink;
    for (int64_t j = 0; j < n; j++)
        total += weight[j];
    mix(y, shrink, weight, v, n, op->D);
    *state = (Softmax){top, total};
}

// y [R, H D]: the G query heads of a row x [R, (H + 2 Hk) D] that share a KV head attend to all
// positions they may see, through the block table.
static void attend(const Op *op, int64_t task)
{
    int64_t r = task / op->Hk, head = task % op->Hk, D = op->D, S = op->S, G = op->H / op->Hk;
    const float *q = (const float *)op->x + r * (op->H + 2 * op->Hk) * D + head * G * D;
    float *y = (float *)op->y + (r * op->H + head * G) * D;
    const int32_t *table = op->tables + op->requests[r] * op->M;
    int64_t end = op->positions[r] + 1;
    int64_t at = op->window && end > op->window ? end - op->window : 0;
    Softmax state[G];
    for (int64_t g = 0; g < G; g++)
        state[g] = (Softmax){-1e30f, 0};
    memset(y, 0, G * D * sizeof *y);
    for (int64_t n; at < end; at += n) {
        n = S - at % S < TILE ? S - at % S : TILE; // up to the block's end
        n = end - at < n ? end - at : n;
        int64_t slot = table[at / S] * S + at % S;
        const float *k = op->kv + pool_offset(op, slot) + head * S * D;
        for (int64_t g = 0; g < G; g++)
            attend_tile(op, q + g * D, k, k + op->k_to_v, n, y + g * D, state + g);
    }
    for (int64_t g = 0; g < G; g++)
        for (int64_t d = 0; d < D; d++)
            y[g * D + d] /= state[g].total;
}

// -------------------------------------------------------------------------------------------------
// Linear layers: y [R, N] = activation(x [R, K] weight^T + bias)
//
// In fp32 the weights [N, K] are kept in panels of 16 outputs, [N / 16, K, 16]: an input is
// multiplied with a panel's 16 weights at once, and each output is the sum over K in its order.
// Integers are kept as [N, K].

enum { ROW_BLOCK = 66, MOST_COLUMNS = 256, CACHE = 1 << 18 }; // of a task; bytes of its weights
enum { VECTORS = PANEL / LANES, ROOM = MOST_COLUMNS + 4 * PANEL };

// Products of `rows` rows of x with `panels` panels of weights.
INLINE void tile_fp32(
    const float *w, const float *x, int64_t K, int rows, int panels, float y[][ROOM])
{
    Vector sum[ROWS][4 * VECTORS] = {0};
    for (int64_t k = 0; k < K; k++)
        for (int v = 0; v < panels * VECTORS; v++) {
            Vector weights = load(w + v / VECTORS * PANEL * K + k * PANEL + v % VECTORS * LANES);
            for (int r = 0; r < rows; r++)
                sum[r][v] += weights * x[r * K + k];
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < panels * VECTORS; v++)
            store(y[r] + v * LANES, sum[r][v]);
}

// Products of `rows` rows of integers x with `cols` rows of w, exact. The compiler makes multiply-add
// instructions for pairs of 16 bits of it.
INLINE void tile_int8(const int8_t *w, const float *scale, const int16_t *x, const float *x_scale,
                      int64_t K, int rows, int cols, float y[][ROOM])
{
    int32_t sum[ROWS][COLS] = {0};
    for (int64_t k = 0; k < K; k++)
        for (int c = 0; c < cols; c++)
            for (int r = 0; r < rows; r++)
                sum[r][c] += w[c * K + k] * x[r * K + k];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++)
            y[r][c] = (float)sum[r][c] * (scale[c] * x_scale[r]);
}

// Columns n .. n + cols, to y, of a number of rows that the compiler knows.
INLINE void product_of(
    const Op *op, int64_t r, const int rows, int64_t n, int64_t cols, float y[][ROOM])
{
    int64_t K = op->K, c = 0;
    if (op->scale) {
        const int8_t *w = (const int8_t *)op->weight + n * K;
        const int16_t *x = (const int16_t *)op->x + r * K;
        for (; c + COLS <= cols; c += COLS)
            tile_int8(w + c * K, op->scale + n + c, x, op->x_scale + r, K, rows, COLS, (void *)(y[0] + c));
        for (; c < cols; c++)
            tile_int8(w + c * K, op->scale + n + c, x, op->x_scale + r, K, rows, 1, (void *)(y[0] + c));
        return;
    }
    const float *w = (const float *)op->weight + n * K, *x = (const float *)op->x + r * K;
    int most = SUMS / (rows * VECTORS);
    const int panels = most > 4 ? 4 : most;
    for (; c + panels * PANEL <= cols; c += panels * PANEL)
        tile_fp32(w + c * K, x, K, rows, panels, (void *)(y[0] + c));
    for (; c < cols; c += PANEL)
        tile_fp32(w + c * K, x, K, rows, 1, (void *)(y[0] + c));
}

static void product(
    const Op *op, int64_t r, int rows, int64_t n, int64_t cols, float y[][ROOM])
{
    switch (rows) {
    case 1: product_of(op, r, 1, n, cols, y); break;
    case 2: product_of(op, r, 2, n, cols, y); break;
    case 3: product_of(op, r, 3, n, cols, y); break;
    case 4: product_of(op, r, 4, n, cols, y); break;
    case 5: product_of(op, r, 5, n, cols, y); break;
    default: product_of(op, r, ROWS, n, cols, y);
    }
}

static void add_bias(const Op *op, float *y, int64_t n, int64_t cols)
{
    if (op->bias)
        for (int64_t c = 0; c < cols; c++)
            y[c] += op->bias[n + c];
}

// Outputs of a layer: of a gated one, half of the weights' rows.
static int64_t outputs(const Op *op) { return op->gated ? op->N / 2 : op->N; }

// Columns of a task: few enough that the weights stay in a cache, and that all threads have some.
static int64_t columns(const Op *op, int threads)
{
    int64_t bytes = op->K * (op->scale ? 1 : 4) * (op->gated ? 2 : 1);
    int64_t most = CACHE / bytes, share = outputs(op) / (4 * threads);
    most = share < most ? share : most;
    most = most < MOST_COLUMNS ? most : MOST_COLUMNS;
    return most < 16 ? 16 : most / 16 * 16;
}

static void linear(const Op *op, int64_t R, int64_t task, int threads)
{
    float gate[ROWS][ROOM], up[ROWS][ROOM];
    int64_t N = outputs(op), width = columns(op, threads), blocks = (N + width - 1) / width;
    int64_t n = task % blocks * width, cols = N - n < width ? N - n : width;
    int64_t into_panel = (N + n) % op->panel; // where the first column of `up` is
    int64_t r = task / blocks * ROW_BLOCK, end = R - r < ROW_BLOCK ? R : r + ROW_BLOCK;
    for (int rows; r < end; r += rows) {
        rows = end - r < ROWS ? (int)(end - r) : ROWS;
        product(op, r, rows, n, cols, gate);
        if (op->gated)
            product(op, r, rows, N + n - into_panel, cols + into_panel, up);
        for (int i = 0; i < rows; i++) {
            float *y = (float *)op->y + (r + i) * N + n;
            add_bias(op, gate[i], n, cols);
            activate(gate[i], cols, op->activation);
            if (op->gated)
                add_bias(op, up[i] + into_panel, N + n, cols);
            for (int64_t c = 0; c < cols; c++)
                y[c] = op->gated ? gate[i][c] * up[i][c + into_panel] : gate[i][c];
            if (op->cap)
                for (int64_t c = 0; c < cols; c++)
                    y[c] = capped(y[c], (float)op->cap);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// The pool of threads

typedef struct {
    _Alignas(64) atomic_int_fast64_t next; // task, of a thread's share
} Share;

typedef struct {
    _Alignas(64) atomic_int_fast64_t done; // tasks of all threads
    int64_t tasks;
    Share *shares; // [threads]
} Phase;

typedef struct {
    int threads; // the one that calls `run` among them
    pthread_t *workers;
    const Op *ops; // of the run under way
    int64_t count, R, room;
    Phase *phases; // [room], of which `count` are used
    Share *shares; // [room, threads]
    atomic_int state;     // OPEN, while workers may enter, plus how many are in
    atomic_int run;       // which run it is
    atomic_bool closing;
    pthread_mutex_t lock; // of what follows
    pthread_cond_t wake;
    int asleep;
} Pool;

enum { OPEN = 1 << 16, PATIENCE = 2000 }; // looks before a thread gives way to others

static void (*const OPERATORS[])(const Op *, int64_t) = {
    embed, rotation, add_norm, round_row, heads, attend, NULL};

static int64_t num_tasks(const Op *op, int64_t R, int threads)
{
    if (OPERATORS[op->kind] == attend)
        return R * op->Hk;
    if (OPERATORS[op->kind])
        return R;
    int64_t width = columns(op, threads), row_blocks = (R + ROW_BLOCK - 1) / ROW_BLOCK;
    return row_blocks * ((outputs(op) + width - 1) / width);
}

static void pause_for(int looks)
{
    if (looks > PATIENCE)
        sched_yield();
#if defined(__x86_64__)
    else
        __builtin_ia32_pause();
#endif
}

// All phases of a run, as thread `me`: of each its own share first, then what others have left. So
// nobody waits for a thread that is late, only for tasks that another has begun.
static void take_part(Pool *pool, int me)
{
    int threads = pool->threads;
    for (int64_t i = 0; i < pool->count; i++) {
        const Op *op = pool->ops + i;
        Phase *phase = pool->phases + i;
        int64_t tasks = phase->tasks, did = 0;
        for (int t = 0; t < threads; t++) {
            int owner = (me + t) % threads;
            int64_t task, end = tasks * (owner + 1) / threads;
            while ((task = atomic_fetch_add(&phase->shares[owner].next, 1)) < end) {
                if (OPERATORS[op->kind])
                    OPERATORS[op->kind](op, task);
                else
                    linear(op, pool->R, task, threads);
                did++;
            }
        }
        atomic_fetch_add(&phase->done, did);
        for (int looks = 0; atomic_load(&phase->done) < tasks; looks++)
            pause_for(looks);
    }
}

// Sleep until there is another run than `seen`, after a while of looking out for it.
static void wait_for_run(Pool *pool, int seen)
{
    for (int looks = 0; looks < PATIENCE; looks++) {
        if (atomic_load(&pool->run) != seen)
            return;
        pause_for(looks);
    }
    pthread_mutex_lock(&pool->lock);
    pool->asleep++;
    while (atomic_load(&pool->run) == seen)
        pthread_cond_wait(&pool->wake, &pool->lock);
    pool->asleep--;
    pthread_mutex_unlock(&pool->lock);
}

typedef struct {
    Pool *pool;
    int me;
} Worker;

static void *work(void *argument)
{
    Worker worker = *(Worker *)argument;
    Pool *pool = worker.pool;
    free(argument);
    for (int seen = 0;;) {
        wait_for_run(pool, seen);
        seen = atomic_load(&pool->run);
        if (atomic_load(&pool->closing))
            return NULL;
        if (atomic_fetch_add(&pool->state, 1) & OPEN)
            take_part(pool, worker.me);
        atomic_fetch_sub(&pool->state, 1);
    }
}

static void announce(Pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->run, 1);
    if (pool->asleep)
        pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

// A pool of so many threads, or of fewer where the system gives no more.
Pool *open_pool(int threads)
{
    Pool *pool = calloc(1, sizeof *pool);
    pool->workers = calloc(threads, sizeof *pool->workers);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    for (pool->threads = 1; pool->threads < threads; pool->threads++) {
        Worker *worker = malloc(sizeof *worker);
        *worker = (Worker){pool, pool->threads};
        if (pthread_create(&pool->workers[pool->threads], NULL, work, worker)) {
            free(worker);
            break;
        }
    }
    return pool;
}

void close_pool(Pool *pool)
{
    atomic_store(&pool->closing, true);
    announce(pool);
    for (int t = 1; t < pool->threads; t++)
        pthread_join(pool->workers[t], NULL);
    free(pool->phases);
    free(pool->shares);
    free(pool->workers);
    free(pool);
}

// Compute `count` operators of R rows, one after the other.
void run(Pool *pool, const Op *ops, int64_t count, int64_t R)
{
    int threads = pool->threads;
    if (count > pool->room) {
        free(pool->phases);
        free(pool->shares);
        pool->phases = aligned_alloc(64, count * sizeof *pool->phases);
        pool->shares = aligned_alloc(64, count * threads * sizeof *pool->shares);
        pool->room = count;
    }
    pool->ops = ops;
    pool->count = count;
    pool->R = R;
    for (int64_t i = 0; i < count; i++) {
        int64_t tasks = num_tasks(ops + i, R, threads);
        pool->phases[i] = (Phase){.tasks = tasks, .shares = pool->shares + i * threads};
        for (int t = 0; t < threads; t++)
            pool->phases[i].shares[t].next = tasks * t / threads;
    }
    atomic_fetch_or(&pool->state, OPEN);
    announce(pool);
    take_part(pool, 0);
    atomic_fetch_and(&pool->state, ~OPEN);
    for (int looks = 0; atomic_load(&pool->state); looks++)
        pause_for(looks);
}
