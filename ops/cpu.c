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
#include <unistd.h>

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    int64_t kind; // place in OPERATORS
    // what it reads and writes, [R, K] and [R, N]: numbers, or integers of 16 bits
    union { float *x; const int16_t *x16; };
    union { float *y; int16_t *y16; };
    // of a layer, a norm or an embedding: numbers, or integers of 8 bits; see `linear`
    union { const float *weight; const int8_t *weight8; };
    float *x_scale;           // [R] of x in integers
    const float *scale;       // [N] of weights in integers, else NULL
    const float *bias;        // [N] or NULL
    const float *delta;       // add_norm: [R, K] or NULL
    const float *k_norm;      // heads: [D] or NULL; `weight` is that of q
    const float *rotation;    // heads: [R, D] or NULL, what `rotation` wrote
    float *kv;                // one layer's pool [2, num_blocks + 1, Hk, S, D]
    const int64_t *tokens;    // [R]
    const int64_t *positions; // [R]
    const int64_t *slots;     // [R] where K and V of the row go
    const int64_t *requests;  // [R] whose block table
    const int32_t *tables;    // [B, M] block tables
    int64_t N, K, H, Hk, D, S, M, k_to_v, window, panel, activation, gated, rms;
    double factor; // scale of the embedding or of scores, epsilon of norms, largest integer
    double cap;    // soft cap of scores or logits; 0: none
} Op;

// -------------------------------------------------------------------------------------------------
// Vectors and functions

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 8, SUMS = 16 }; // numbers of a vector; rows and vectors of a tile
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 4, SUMS = 8 };
#else
enum { LANES = 4, ROWS = 4, SUMS = 8 };
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE Vector load(const float *x) { return *(const Unaligned *)x; }

INLINE void store(float *x, Vector v) { *(Unaligned *)x = v; }

typedef float Four __attribute__((vector_size(16), may_alias));

INLINE float sum_of(Vector v)
{
    const Four *part = (const Four *)&v;
    Four sum = part[0];
    for (int i = 1; i < LANES / 4; i++)
        sum += part[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

typedef int32_t Bits __attribute__((may_alias)); // of a number

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

// e^x, to 2 units of the last place, as the sum of 2^n, *power, and what is returned. What is left of
// x, |left| < ln(2) / 2, goes into a polynomial.
INLINE float exp_beyond(float x, float *power)
{
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    const float whole = 12582912.0f; // 1.5 * 2^23: added to a number it rounds it
    float n = x * 1.44269504f + whole;
    int32_t bits;
    memcpy(&bits, &n, 4);
    bits = (bits - 0x4b400000 + 127) << 23;
    memcpy(power, &bits, 4);
    n -= whole;
    float left = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * left + 1.3981999507e-3f;
    y = y * left + 8.3334519073e-3f;
    y = y * left + 4.1665795894e-2f;
    y = y * left + 1.6666665459e-1f;
    y = y * left + 5.0000001201e-1f;
    return *power * (y * left * left + left);
}

INLINE float exponential(float x)
{
    float power, beyond = exp_beyond(x, &power);
    return beyond + power;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// cap * tanh(x / cap), with e^(2 x / cap) - 1 that is exact near 0.
INLINE float capped(float x, float cap)
{
    float power, beyond = exp_beyond(2.0f * x / cap, &power), e = beyond + (power - 1.0f);
    return cap * (e / (e + 2.0f));
}

enum { NONE, GELU_NEW, GELU, RELU, RELU2, SILU }; // model.ACTIVATIONS, in its order

INLINE float activated(float x, int64_t activation)
{
    switch (activation) {
    case GELU_NEW: // 0.5 (1 + tanh(u)) is sigmoid(2 u)
        return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case RELU: return x < 0 ? 0 : x; // NaN stays one
    case RELU2: return x < 0 ? 0 : x * x;
    case SILU: return x * sigmoid(x);
    default: return x;
    }
}

// -------------------------------------------------------------------------------------------------
// Operators of a row

// y [R, K]: the token's embedding times `factor`, and that of its position where there are such.
static void embed(const Op *op, int64_t r)
{
    int64_t K = op->K, token = op->tokens[r], panel = op->panel;
    int64_t at = token / panel * panel * K + token % panel;
    float *y = op->y + r * K, factor = (float)op->factor;
    for (int64_t k = 0; k < K; k++)
        if (op->scale)
            y[k] = op->weight8[at + k] * op->scale[token] * factor;
        else
            y[k] = op->weight[at + k * panel] * factor;
    if (op->bias)
        for (int64_t k = 0; k < K; k++)
            y[k] += op->bias[op->positions[r] * K + k];
}

// y [R, D]: cosines and sines of the position times each of the D / 2 frequencies, `weight`.
static void rotation(const Op *op, int64_t r)
{
    int64_t half = op->D / 2;
    float *y = op->y + r * op->D;
    for (int64_t i = 0; i < half; i++) {
        float angle = (float)op->positions[r] * op->weight[i];
        y[i] = cosf(angle);
        y[i + half] = sinf(angle);
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
    float *x = op->x + r * K, *y = op->y + r * K, epsilon = (float)op->factor;
    if (op->delta)
        for (int64_t k = 0; k < K; k++)
            x[k] += op->delta[r * K + k];
    if (op->rms) {
        rms_norm(x, y, op->weight, K, epsilon);
        return;
    }
    double sum = 0;
    for (int64_t k = 0; k < K; k++)
        sum += x[k];
    float mean = (float)(sum / (double)K);
    for (int64_t k = 0; k < K; k++)
        y[k] = x[k] - mean;
    rms_norm(y, y, op->weight, K, epsilon);
    if (op->bias)
        for (int64_t k = 0; k < K; k++)
            y[k] += op->bias[k];
}

// y [R, K] are the numbers x as integers of at most `factor`, x_scale [R] the size of a step.
static void round_row(const Op *op, int64_t r)
{
    int64_t K = op->K;
    const float *x = op->x + r * K;
    int16_t *y = op->y16 + r * K;
    float top = 1e-30f, largest = (float)op->factor;
    int32_t bits;
    memcpy(&bits, &top, 4);
    for (int64_t k = 0; k < K; k++) { // bits are in the order of numbers, and NaN beyond them
        int32_t size = ((const Bits *)x)[k] & INT32_MAX;
        bits = size > bits ? size : bits;
    }
    memcpy(&top, &bits, 4);
    for (int64_t k = 0; k < K; k++)
        y[k] = (int16_t)rintf(x[k] * (largest / top));
    op->x_scale[r] = top / largest;
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
    float *x = op->x + r * (H + 2 * Hk) * D;
    for (int64_t h = 0; h < H + Hk; h++) {
        float *head = x + h * D;
        const float *weight = h < H ? op->weight : op->k_norm;
        if (weight)
            rms_norm(head, head, weight, D, (float)op->factor);
        if (op->rotation)
            rotate(head, op->rotation + r * D, D);
    }
    float *k = op->kv + pool_offset(op, op->slots[r]), *v = k + op->k_to_v;
    x += H * D;
    for (int64_t h = 0; h < Hk; h++) {
        memcpy(k + h * op->S * D, x + h * D, D * sizeof *x);
        memcpy(v + h * op->S * D, x + (Hk + h) * D, D * sizeof *x);
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

// Online softmax (Milakov and Gimelshein 2018): n <= TILE more keys k [n, D], with their values, of
// the query q [D]; y [D] is the weighted sum of values so far.
static void attend_tile(
    const Op *op, const float *q, const float *k, int64_t n, float *y, Softmax *state)
{
    float weight[TILE], top = state->top, total = 0;
    for (int64_t j = 0; j < n; j++) {
        weight[j] = dot(q, k + j * op->D, op->D) * (float)op->factor;
        if (op->cap)
            weight[j] = capped(weight[j], (float)op->cap);
        top = weight[j] > top ? weight[j] : top;
    }
    for (int64_t j = 0; j < n; j++)
        weight[j] = exponential(weight[j] - top);
    for (int64_t j = 0; j < n; j++)
        total += weight[j];
    float shrink = exponential(state->top - top);
    mix(y, shrink, weight, k + op->k_to_v, n, op->D);
    *state = (Softmax){top, state->total * shrink + total};
}

// y [R, H D]: the G query heads of a row x [R, (H + 2 Hk) D] that share a KV head attend to all
// positions they may see, through the block table.
static void attend(const Op *op, int64_t task)
{
    int64_t r = task / op->Hk, head = task % op->Hk, D = op->D, S = op->S, G = op->H / op->Hk;
    const float *q = op->x + (r * (op->H + 2 * op->Hk) + head * G) * D;
    float *y = op->y + (r * op->H + head * G) * D;
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
            attend_tile(op, q + g * D, k, n, y + g * D, state + g);
    }
    for (int64_t g = 0; g < G; g++)
        for (int64_t d = 0; d < D; d++)
            y[g * D + d] /= state[g].total;
}

// -------------------------------------------------------------------------------------------------
// Linear layers: y [R, N] = activation(x [R, K] weight^T + bias)
//
// Weights come in panels of 32 outputs, zeros behind the last: in fp32 [N / 32, K, 32], so that an
// input is multiplied with a panel's 32 weights at once, and each output is a sum over K in its
// order; integers [N / 32, 32, K], for sums over K at once.

enum { AHEAD = 3072 };
enum { PANEL = 32, ROW_BLOCK = 64, K_BLOCK = 512 }; // rows of a task; inputs of a partial sum

// Products of `rows` rows of x [.., K] with `count` of a panel's vectors w, to y [rows, PANEL].
// Partial sums keep the error small: it grows with how many numbers are added one by one.
INLINE void tile_fp32(const float *w, const float *x, int64_t K, int rows, int count, float *y)
{
    for (int64_t k = 0; k < K;) {
        Vector sum[ROWS][PANEL / LANES] = {0};
        bool is_first = k == 0;
        for (int64_t end = K - k < K_BLOCK ? K : k + K_BLOCK; k < end; k++)
            for (int v = 0; v < count; v++) {
                Vector weights = load(w + k * PANEL + v * LANES);
                for (int r = 0; r < rows; r++)
                    sum[r][v] += weights * x[r * K + k];
            }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < count; v++) {
                float *total = y + r * PANEL + v * LANES;
                store(total, is_first ? sum[r][v] : load(total) + sum[r][v]);
            }
    }
}

// Products of `rows` rows of x [.., K] with `count` outputs' weights w [.., K]: the compiler makes
// multiply-add instructions for pairs of 16 bits of it.
INLINE void tile_int8(const int8_t *w, const int16_t *x, int64_t K, int rows, int count, int32_t *y)
{
    int32_t sum[ROWS][SUMS] = {0};
    for (int64_t k = 0; k < K; k++)
        for (int c = 0; c < count; c++)
            for (int r = 0; r < rows; r++)
                sum[r][c] += w[c * K + k] * x[r * K + k];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < count; c++)
            y[r * PANEL + c] = sum[r][c];
}

// Rows r .. r + rows, a number that the compiler knows, times a panel, to y [rows, PANEL].
INLINE void product_of(const Op *op, int64_t r, const int rows, int64_t panel, float *y)
{
    int64_t K = op->K, n = panel * PANEL;
    if (!op->scale) {
        const int most = SUMS / rows, count = most < PANEL / LANES ? most : PANEL / LANES;
        for (int c = 0; c < PANEL; c += count * LANES)
            tile_fp32(op->weight + n * K + c, op->x + r * K, K, rows, count, y + c);
        return;
    }
    const int count = SUMS / rows < 4 ? SUMS / rows : 4;
    int32_t sums[ROWS * PANEL];
    for (int c = 0; c < PANEL; c += count) {
        for (int64_t ahead = 0; rows == 1 && ahead < count * K; ahead += 64)
            __builtin_prefetch(op->weight8 + (n + c) * K + AHEAD + ahead);
        tile_int8(op->weight8 + (n + c) * K, op->x16 + r * K, K, rows, count, sums + c);
    }
    for (int i = 0; i < rows * PANEL; i++)
        y[i] = (float)sums[i] * (op->scale[n + i % PANEL] * op->x_scale[r + i / PANEL]);
}

static void product(const Op *op, int64_t r, int rows, int64_t panel, float *y)
{
    switch (rows) {
    case 1: product_of(op, r, 1, panel, y); break;
    case 2: product_of(op, r, 2, panel, y); break;
    case 4: product_of(op, r, 4, panel, y); break;
    default: product_of(op, r, ROWS, panel, y);
    }
}

// Outputs n .. n + count of a row: bias, activation, and the gate's other half, `up`.
static void finish(const Op *op, float *gate, const float *up, int64_t n, int64_t count, float *y)
{
    if (op->bias)
        for (int64_t i = 0; i < count; i++)
            gate[i] += op->bias[n + i];
    for (int64_t i = 0; i < count; i++)
        y[i] = activated(gate[i], op->activation);
    if (op->gated)
        for (int64_t i = 0; i < count; i++)
            y[i] *= op->bias ? up[i] + op->bias[op->N + n + i] : up[i];
    if (op->cap)
        for (int64_t i = 0; i < count; i++)
            y[i] = capped(y[i], (float)op->cap);
}

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Panels of a task: one or, of many, a few.
static int64_t width(const Op *op, int threads) { return divide_up(op->N, PANEL * 8 * threads); }

static void linear(const Op *op, int64_t R, int64_t task, int threads)
{
    float gate[ROWS * PANEL], up[ROWS * PANEL];
    int64_t panels = divide_up(op->N, PANEL), tasks = divide_up(panels, width(op, threads));
    int64_t first = task % tasks * panels / tasks, end = (task % tasks + 1) * panels / tasks;
    int64_t start = task / tasks * ROW_BLOCK, stop = R - start < ROW_BLOCK ? R : start + ROW_BLOCK;
    for (int64_t panel = first; panel < end; panel++) {
        int64_t n = panel * PANEL, count = op->N - n < PANEL ? op->N - n : PANEL;
        int rows = ROWS;
        for (int64_t r = start; r < stop; r += rows) {
            while (rows > stop - r)
                rows /= 2;
            product(op, r, rows, panel, gate);
            if (op->gated)
                product(op, r, rows, panels + panel, up);
            for (int i = 0; i < rows; i++)
                finish(op, gate + i * PANEL, up + i * PANEL, n, count, op->y + (r + i) * op->N + n);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// The pool of threads

typedef struct {
    _Alignas(64) atomic_int_fast64_t number; // in a cache line of its own
} Counter;

typedef struct Pool {
    int threads;   // the one that calls `run` is number 0
    pid_t process; // that has them
    struct Worker {
        pthread_t thread;
        struct Pool *pool;
    } *workers;
    const Op *ops; // of the run under way
    int64_t count, R, room;
    // [room, threads + 1]: of each operator the next task of each thread's share, and the tasks
    // that are done
    Counter *counters;
    atomic_int state; // OPEN, while workers may enter, plus how many are in
    atomic_int runs;  // so far; -1: the pool is closed
    pthread_mutex_t lock;
    pthread_cond_t wake;
} Pool;

enum { OPEN = 1 << 16, PATIENCE = 2000 }; // looks before a thread gives way to others

#ifndef WORTH_SHARING               // tests share whatever there is
#define WORTH_SHARING (1 << 20)     // products: a thread alone takes 30 us for them
#endif

static void (*const OPERATORS[])(const Op *, int64_t) = {
    embed, rotation, add_norm, round_row, heads, attend, NULL};

static int64_t num_tasks(const Op *op, int64_t R, int threads)
{
    if (OPERATORS[op->kind] == attend)
        return R * op->Hk;
    if (OPERATORS[op->kind])
        return R;
    return divide_up(R, ROW_BLOCK) * divide_up(divide_up(op->N, PANEL), width(op, threads));
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

// All operators of a run, as thread `me`: of each its own share first, then what others have left.
// So nobody waits for a thread that is late, only for tasks that another has begun.
static void take_part(Pool *pool, int me)
{
    int threads = pool->threads;
    Counter *next = pool->counters;
    for (const Op *op = pool->ops; op < pool->ops + pool->count; op++, next += threads + 1) {
        int64_t tasks = num_tasks(op, pool->R, threads), did = 0;
        for (int t = 0; t < threads; t++) {
            int owner = (me + t) % threads;
            int64_t task, end = tasks * (owner + 1) / threads;
            while ((task = atomic_fetch_add(&next[owner].number, 1)) < end) {
                if (OPERATORS[op->kind])
                    OPERATORS[op->kind](op, task);
                else
                    linear(op, pool->R, task, threads);
                did++;
            }
        }
        Counter *done = next + threads;
        atomic_fetch_add(&done->number, did);
        for (int looks = 0; atomic_load(&done->number) < tasks; looks++)
            pause_for(looks);
    }
}

// The number of the run after `seen`: after a while of looking out for it, asleep.
static int wait_for_run(Pool *pool, int seen)
{
    for (int looks = 0; looks < PATIENCE; looks++) {
        if (atomic_load(&pool->runs) != seen)
            return atomic_load(&pool->runs);
        pause_for(looks);
    }
    pthread_mutex_lock(&pool->lock);
    while (atomic_load(&pool->runs) == seen)
        pthread_cond_wait(&pool->wake, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    return atomic_load(&pool->runs);
}

static void announce(Pool *pool, int run)
{
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->runs, run);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

static void *work(void *argument)
{
    struct Worker *me = argument;
    Pool *pool = me->pool;
    for (int run = 0; (run = wait_for_run(pool, run)) >= 0;) {
        if (atomic_fetch_add(&pool->state, 1) & OPEN)
            take_part(pool, (int)(me - pool->workers));
        atomic_fetch_sub(&pool->state, 1);
    }
    return NULL;
}

// A forked process has none of the threads, and may have the lock of one.
static void notice_fork(Pool *pool)
{
    if (pool->process == getpid())
        return;
    pool->process = getpid();
    pool->threads = 1;
    atomic_store(&pool->state, 0);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
}

// A pool of so many threads, or of fewer where the system gives no more.
Pool *open_pool(int threads)
{
    Pool *pool = calloc(1, sizeof *pool);
    pool->workers = calloc(threads, sizeof *pool->workers);
    notice_fork(pool);
    for (pool->threads = 1; pool->threads < threads; pool->threads++) {
        struct Worker *worker = pool->workers + pool->threads;
        worker->pool = pool;
        if (pthread_create(&worker->thread, NULL, work, worker))
            break;
    }
    return pool;
}

void close_pool(Pool *pool)
{
    notice_fork(pool);
    announce(pool, -1);
    for (int t = 1; t < pool->threads; t++)
        pthread_join(pool->workers[t].thread, NULL);
    free(pool->counters);
    free(pool->workers);
    free(pool);
}

// Compute `count` operators of R rows, one after the other.
void run(Pool *pool, const Op *ops, int64_t count, int64_t R)
{
    notice_fork(pool);
    int threads = pool->threads;
    if (count > pool->room) {
        free(pool->counters);
        pool->counters = aligned_alloc(64, count * (threads + 1) * sizeof *pool->counters);
        pool->room = count;
    }
    int64_t products = 0;
    for (int64_t i = 0; i < count; i++) {
        products += R * ops[i].N * ops[i].K;
        Counter *next = pool->counters + i * (threads + 1);
        for (int t = 0; t < threads; t++)
            atomic_init(&next[t].number, num_tasks(ops + i, R, threads) * t / threads);
        atomic_init(&next[threads].number, 0);
    }
    pool->ops = ops;
    pool->count = count;
    pool->R = R;
    if (products > WORTH_SHARING) {
        atomic_fetch_or(&pool->state, OPEN);
        announce(pool, (atomic_load(&pool->runs) + 1) & INT32_MAX);
    }
    take_part(pool, 0);
    atomic_fetch_and(&pool->state, ~OPEN);
    for (int looks = 0; atomic_load(&pool->state); looks++)
        pause_for(looks);
}
