/*
The decoder's operators on a CPU, in fp32 or with 8-bit integer weights. This file is the CPU's
counterpart of kernels.py. It is compiled and called by ops/cpu.py.

A step is a program: a list of `Op` structs that is recorded once, and runs from top to bottom. An
operator reads the rows of its x and writes the rows of its y. It is divided into tasks, which are
shared by a pool of threads. The next operator starts when all tasks of the previous one are done.

    op        embed   add_norm   linear     heads    attend    linear    add_norm ..
    tasks     a row   a row      rows x     a row    a row,    ..
                                 columns             a KV head
    thread 0  ####    ##         ########   ##       #####     ######
    thread 1  ####    ##         #######    ##       ######    #####

A row's result is identical to the last bit, whatever else is in the batch and however many threads
there are, because no sum depends on where a task begins or on how many rows it has. Sums of
integers are exact: 8-bit weights are multiplied by activations of at most 16 bits, which are
limited so that a sum fits into 32 bits.

The result is also the same on every machine and with every compiler, because this file determines
all of its arithmetic. Neither the order of a sum nor its number of partial sums depends on the
width of the CPU's vectors. Compilers may not fuse a product and a sum (-ffp-contract=off); where
only one rounding is wanted, the code calls `fused`. C library functions are used only if they are
exact or correctly rounded, such as fabsf, rintf and sqrtf.

Letters: R rows (tokens of the step), N outputs, K inputs, H query heads, Hk KV heads, G = H / Hk,
D head size, S block size, M blocks per table, B requests.
*/

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    int64_t kind; // see `compute`
    // input [R, K] and output [R, N]: floats, 16-bit integers, or tokens
    union { float *x; const int16_t *x16; };
    union { float *y; int16_t *y16; int64_t *y64; };
    // weights of a layer, norm or embedding: floats or 8-bit integers; see `linear`
    union { const float *weight; const int8_t *weight8; };
    float *x_scale;           // [R] scales of an integer x
    const float *scale;       // [N] scales of integer weights per output, else NULL
    const float *columns;     // [K] scales of integer weights per input
    const float *bias;        // [N] or NULL
    const float *delta;       // add_norm: [R, K] or NULL
    const float *temperature; // choose: [R] or NULL
    const float *lowest;      // choose: [R] or NULL
    const float *k_norm;      // heads: [D], [Hk D] or NULL; `weight` is the norm of q
    const float *rotation;    // heads: [R, D], the result of `rotation`, or NULL
    float *kv;                // a layer's pool: K [blocks, Hk, D, S], then V [blocks, Hk, S, D]
    const int64_t *tokens;    // [R]; choose: seeds
    const int64_t *positions; // [R]
    const int64_t *slots;     // [R] for K and V of each row; choose: choices
    const int64_t *requests;  // [R] index of each row's block table; a request's rows are adjacent
    const int32_t *tables;    // [B, M] block tables; choose: [R, M] bits of allowed tokens, or NULL
    int64_t N, K, H, Hk, D, S, M, k_to_v, window, panel, activation, gated, rms;
    int64_t wide, late; // heads: one norm over all heads; norms after the rotation
    float factor; // scale of the embedding or of scores; epsilon of norms; largest integer
    float cap;    // soft cap for scores or logits; 0: none
} Op;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// -------------------------------------------------------------------------------------------------
// Vectors and functions

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 8, SUMS = 16 }; // floats per vector; maximum rows and vectors per tile
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 4, SUMS = 8 };
#else
enum { LANES = 4, ROWS = 4, SUMS = 8 };
#endif
enum { PANEL = 32 }; // number of a layer's outputs that are computed together
enum { PARTS = 16 }; // number of partial sums per row: element i is added to sum i % PARTS

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef union { float number; int32_t bits; } Number;

// a * b + c, rounded once.
INLINE float fused(float a, float b, float c)
{
#if defined(__FMA__) || defined(__aarch64__)
    return fmaf(a, b, c);
#else
    // In double precision, the product is exact. The sum is rounded to odd (Boldo and Melquiond
    // 2008): if part of it is lost, its last bit is set, so that it cannot be a tie when it is
    // converted to a float.
    union { double number; int64_t bits; } sum = {(double)a * b + c};
    double product = (double)a * b, added = sum.number - product;
    double lost = (product - (sum.number - added)) + (c - added);
    int grows = (lost > 0) == (sum.number > 0);
    if ((lost > 0 || lost < 0) && !(sum.bits & 1))
        sum.bits += grows ? 1 : -1;
    return sum.number;
#endif
}

// A polynomial in x, highest power first, with one rounding per power.
INLINE float polynomial(float x, int count, const float *factors)
{
    float y = factors[0];
    for (int i = 1; i < count; i++)
        y = fused(y, x, factors[i]);
    return y;
}

// e^x = 2^n e^left with |left| < ln(2) / 2, accurate to 2 units in the last place. Sets *power to
// 2^n and returns e^left - 1, so that e^x - 1 is accurate near 0. The polynomial is from Cephes
// (Moshier).
INLINE float exp_parts(float x, float *power)
{
    x = x > 88.0f ? 88.0f : x < -88.0f ? -88.0f : x;
    const float whole = 12582912.0f; // 1.5 * 2^23: adding this rounds to a whole number
    Number rounded = {fused(x, 1.44269504f, whole)};
    Number scale = {.bits = (rounded.bits - 0x4b400000 + 127) << 23};
    *power = scale.number;
    float n = rounded.number - whole;
    float left = fused(n, 0.000212194440f, fused(n, -0.693359375f, x));
    const float factors[] = {
        0.00019875691500f, 0.0013981999507f, 0.0083334519073f, 0.041665795894f, 0.16666665459f,
        0.50000001201f};
    float y = polynomial(left, 6, factors);
    return fused(y * left, left, left);
}

INLINE float exponential(float x)
{
    float power, rest = exp_parts(x, &power);
    return fused(rest, power, power);
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// cap * tanh(x / cap), from e^(2 x / cap) - 1, which is accurate near 0.
INLINE float capped(float x, float cap)
{
    float power, rest = exp_parts(2.0f * x / cap, &power);
    float e = fused(rest, power, power - 1.0f);
    return cap * (e / (e + 2.0f));
}

// -log(x) of a normal number above 0, accurate to 2 units in the last place. The polynomial is from
// Cephes.
INLINE float minus_log(float x)
{
    Number part = {x}; // x = 2^n part, with part from sqrt(1/2) to sqrt(2)
    int32_t n = (part.bits - 0x3f3504f3) >> 23;
    part.bits -= n * (1 << 23);
    const float factors[] = {
        0.070376836292f, -0.11514610310f, 0.11676998740f, -0.12420140846f, 0.14249322787f,
        -0.16668057665f, 0.20000714765f, -0.24999993993f, 0.33333331174f};
    float z = part.number - 1.0f, y = polynomial(z, 9, factors);
    y = y * z * z * z - n * 0.000212194440f - 0.5f * z * z;
    return -(z + y) - n * 0.693359375f;
}

// The fraction of the normal distribution below x, (1 + erf(x / sqrt(2))) / 2, accurate to 2 units
// in the last place. The fraction beyond |x| is e^(-x^2 / 2) times a function that a polynomial in
// `t` approximates to within 3e-8.
INLINE float normal_share(float x)
{
    float t = 1.0f / (1.0f + 0.34f * fabsf(x));
    const float factors[] = {
        -0.0261207458f, 0.139500702f, -0.273135010f, 0.202184987f, -0.0447198564f,
        0.115359679f, 0.115197547f, 0.136112210f, 0.135620503f};
    float beyond = exponential(-0.5f * x * x) * t * polynomial(t, 9, factors);
    return x < 0 ? beyond : 1.0f - beyond;
}

// Cosine and sine of an angle of less than 2^20 quarter turns, accurate to half a unit in the last
// place. Whole quarter turns are subtracted, and the series are summed for the remaining angle.
INLINE void cosine_and_sine(float angle, float *cosine, float *sine)
{
    double quarters = rint(angle * 0.6366197723675814);
    // pi / 2 in two parts; the first has 33 bits, so its multiples are exact
    double left = angle - quarters * 0x1.921fb544p0 - quarters * 0x1.0b4611a626331p-34;
    double square = left * left, c = 1, s = 1;
    for (int i = 12; i; i -= 2) { // each term is the previous term times square / ..
        c = 1 - c * square / (i * (i - 1));
        s = 1 - s * square / (i * (i + 1));
    }
    s *= left;
    double turned[] = {c, -s, -c, s};
    int64_t quarter = quarters;
    *cosine = turned[quarter & 3];
    *sine = turned[(quarter + 3) & 3];
}

enum { NONE, GELU_NEW, GELU, RELU, RELU2, SILU }; // model.ACTIVATIONS, in the same order

#define EACH(value) \
    for (int i = 0; i < PANEL; i++) \
        y[i] = value; \
    break

static void activate(int64_t activation, float *y)
{
    switch (activation) {
    case GELU_NEW: // 0.5 (1 + tanh(u)) is sigmoid(2 u)
        EACH(y[i] * sigmoid(1.5957691216f * (y[i] + 0.044715f * y[i] * y[i] * y[i])));
    case GELU: EACH(y[i] * normal_share(y[i]));
    case RELU: EACH(y[i] < 0 ? 0 : y[i]); // NaN stays NaN
    case RELU2: EACH(y[i] < 0 ? 0 : y[i] * y[i]);
    case SILU: EACH(y[i] * sigmoid(y[i]));
    }
}

// -------------------------------------------------------------------------------------------------
// Operators that compute one row per task

// y [R, K]: the token's embedding times `factor`, plus the position's embedding, if the model has
// position embeddings.
static void embed(const Op *op, int64_t r)
{
    int64_t K = op->K, token = op->tokens[r], panel = op->panel;
    int64_t first = token / panel * panel * K + token % panel;
    float *y = op->y + r * K, factor = op->factor;
    for (int64_t k = 0; k < K; k++) {
        if (op->scale)
            y[k] = op->weight8[first + k] * op->scale[token] * op->columns[k];
        else
            y[k] = op->weight[first + k * panel];
        y[k] *= factor;
        if (op->bias)
            y[k] += op->bias[op->positions[r] * K + k];
    }
}

// y [R, D]: cosines and sines of the position times each of the D / 2 frequencies in `weight`.
static void rotation(const Op *op, int64_t r)
{
    float *cosines = op->y + r * op->D, *sines = cosines + op->D / 2;
    for (int64_t i = 0; i < op->D / 2; i++)
        cosine_and_sine(op->positions[r] * op->weight[i], cosines + i, sines + i);
}

// RMSNorm of K numbers, in place or to y.
static void rms_norm(const float *x, float *y, const float *weight, int64_t K, float epsilon)
{
    Vector sums[PARTS / LANES] = {0};
    int64_t k = 0;
    for (; k + PARTS <= K; k += PARTS)
        for (int v = 0; v < PARTS / LANES; v++) {
            Vector part = *(const Vector *)(x + k + v * LANES);
            sums[v] += part * part;
        }
    float sum = 0;
    for (int i = 0; i < PARTS; i++)
        sum += sums[i / LANES][i % LANES];
    for (; k < K; k++)
        sum += x[k] * x[k];
    float shrink = 1.0f / sqrtf(sum / K + epsilon);
    for (k = 0; k < K; k++)
        y[k] = x[k] * shrink * weight[k];
}

// x += delta; then y = norm(x) if there is a norm. y may be delta itself, or x if there is no
// delta.
static void add_norm(const Op *op, int64_t r)
{
    int64_t K = op->K;
    float *x = op->x + r * K, *y = op->y + r * K;
    if (op->delta)
        for (int64_t k = 0; k < K; k++)
            x[k] += op->delta[r * K + k];
    if (!op->weight)
        return;
    double sum = 0;
    if (!op->rms)
        for (int64_t k = 0; k < K; k++)
            sum += x[k];
    float mean = sum / K;
    for (int64_t k = 0; k < K; k++)
        y[k] = x[k] - mean;
    rms_norm(y, y, op->weight, K, op->factor);
    if (op->bias)
        for (int64_t k = 0; k < K; k++)
            y[k] += op->bias[k];
}

// y [R, K] = e^x
static void exponentials(const Op *op, int64_t r)
{
    const float *x = op->x + r * op->K;
    for (int64_t k = 0; k < op->K; k++)
        op->y[r * op->K + k] = exponential(x[k]);
}

// y [R, K] = x - log(sum of e^x)
static void log_softmax(const Op *op, int64_t r)
{
    int64_t K = op->K;
    const float *x = op->x + r * K;
    float *y = op->y + r * K, top = -INFINITY, sums[PARTS] = {0}, sum = 0;
    for (int64_t k = 0; k < K; k++)
        top = x[k] > top ? x[k] : top;
    for (int64_t k = 0; k < K; k++)
        y[k] = exponential(x[k] - top);
    for (int64_t k = 0; k < K; k++)
        sums[k % PARTS] += y[k];
    for (int i = 0; i < PARTS; i++)
        sum += sums[i];
    float minus = minus_log(sum);
    for (int64_t k = 0; k < K; k++)
        y[k] = x[k] - top + minus;
}

// Standard Gumbel noise from a random word, whose upper 23 bits give a number between 0 and 1.
INLINE float gumbel(uint32_t word)
{
    return minus_log(minus_log(((float)(int32_t)(word >> 9) + 0.5f) * 0x1p-23f));
}

enum { TOKENS = 16 * LANES }; // number of tokens that `choose` takes at a time

// Add noise to TOKENS tokens from k on, as in sampling.gumbel_noise. One call to Philox4x32-10
// makes noise for four tokens from a seed, a position and a choice; here, many calls run in
// parallel.
static void add_noise(float *y, int64_t k, uint64_t seed, uint32_t position, uint32_t choice)
{
    for (uint32_t i = 0; i < TOKENS / 4; i++) {
        uint32_t a = k / 4 + i, b = position, c = choice, d = 0, low = seed, high = seed >> 32;
        for (int round = 0; round < 10; round++) {
            uint64_t first = a * 0xD2511F53ull, second = c * 0xCD9E8D57ull;
            a = (uint32_t)(second >> 32) ^ b ^ low;
            c = (uint32_t)(first >> 32) ^ d ^ high;
            b = second;
            d = first;
            low += 0x9E3779B9u;
            high += 0xBB67AE85u;
        }
        y[4 * i] += gumbel(a);
        y[4 * i + 1] += gumbel(b);
        y[4 * i + 2] += gumbel(c);
        y[4 * i + 3] += gumbel(d);
    }
}

// Ban those of `count` tokens whose bits are 0. Returns the number of words of bits that are not 0.
static int64_t mask(const int32_t *bits, float *scores, int64_t count)
{
    int64_t words = 0;
    for (int64_t i = 0; i < count; i += 32)
        words += bits[i / 32] != 0;
    for (int64_t i = 0; i < count; i++)
        scores[i] = bits[i / 32] >> i % 32 & 1 ? scores[i] : -INFINITY;
    return words;
}

// Choose the token with the best score. Scores x [R, K] are divided by the row's temperature, and
// noise is added; with a temperature of 0 (greedy), neither is done. Only tokens that are allowed
// and not below `lowest` are considered. Ties go to the first token. The result is -1 if the best
// score is not finite.
static void choose(const Op *op, int64_t r)
{
    enum { INFINITE = 0x7f800000 }; // the bits of infinity; larger integers are NaN
    const float *x = op->x + r * op->K, lowest = op->lowest ? op->lowest[r] : -INFINITY;
    const float temperature = op->temperature ? op->temperature[r] : 0;
    int32_t best = -INT32_MAX, bits[TOKENS];
    for (int64_t k = 0; k < op->K; k += TOKENS) {
        int64_t count = least(TOKENS, op->K - k);
        float scores[TOKENS];
        for (int64_t i = 0; i < count; i++) {
            scores[i] = x[k + i] / (temperature > 0 ? temperature : 1);
            scores[i] = scores[i] < lowest ? -INFINITY : scores[i];
        }
        if (op->tables && !mask(op->tables + r * op->M + k / 32, scores, count))
            continue;
        if (temperature > 0)
            add_noise(scores, k, op->tokens[r], op->positions[r], op->slots[r]);
        int32_t top = INT32_MIN;
        for (int64_t i = 0; i < count; i++) { // convert to integers in the same order
            Number score = {scores[i]};
            int32_t size = score.bits & INT32_MAX, sign = score.bits >> 31;
            bits[i] = size > INFINITE ? INT32_MAX : (size ^ sign) - sign;
        }
        for (int64_t i = 0; i < count; i++)
            top = bits[i] > top ? bits[i] : top;
        for (int64_t i = 0; top > best; i++)
            if (bits[i] == top) {
                best = top;
                op->y64[r] = k + i;
            }
    }
    if (abs(best) >= INFINITE)
        op->y64[r] = -1;
}

// y [R, K]: x times `columns`, rounded to integers of at most `factor`. x_scale [R]: each row's
// step size.
static void quantize_row(const Op *op, int64_t r)
{
    const float *x = op->x + r * op->K;
    Number top = {1e-30f};
    for (int64_t k = 0; k < op->K; k++) { // bits sort as the numbers do, with NaN above all
        Number size = {fabsf(x[k] * op->columns[k])};
        top.bits = size.bits > top.bits ? size.bits : top.bits;
    }
    for (int64_t k = 0; k < op->K; k++)
        op->y16[r * op->K + k] = (int16_t)rintf(x[k] * op->columns[k] * (op->factor / top.number));
    op->x_scale[r] = top.number / op->factor;
}

// Rotate numbers i and i + D / 2 of a head by the row's cosines and sines.
static void rotate(float *first, const float *cosines, int64_t half)
{
    float *second = first + half;
    const float *sines = cosines + half;
    for (int64_t i = 0; i < half; i++) {
        float x = first[i], y = second[i];
        first[i] = x * cosines[i] - y * sines[i];
        second[i] = y * cosines[i] + x * sines[i];
    }
}

// x [R, (H + 2 Hk) D] holds queries, keys and values. Normalise and rotate queries and keys in
// place, if the model does so, and store keys and values in the pool.
static void heads(const Op *op, int64_t r)
{
    int64_t D = op->D, H = op->H, Hk = op->Hk, S = op->S, slot = op->slots[r];
    float *x = op->x + r * (H + 2 * Hk) * D, *block = op->kv + slot / S * Hk * S * D;
    if (op->wide) {
        rms_norm(x, x, op->weight, H * D, op->factor);
        rms_norm(x + H * D, x + H * D, op->k_norm, Hk * D, op->factor);
    }
    for (int64_t h = 0; h < H + Hk; h++, x += D) {
        const float *weight = op->wide ? NULL : h < H ? op->weight : op->k_norm;
        if (weight && !op->late)
            rms_norm(x, x, weight, D, op->factor);
        if (op->rotation)
            rotate(x, op->rotation + r * D, D / 2);
        if (weight && op->late)
            rms_norm(x, x, weight, D, op->factor);
    }
    x -= Hk * D;
    for (int64_t h = 0; h < Hk; h++, block += S * D)
        for (int64_t d = 0; d < D; d++, x++) {
            block[d * S + slot % S] = *x;
            block[op->k_to_v + slot % S * D + d] = x[Hk * D];
        }
}

// -------------------------------------------------------------------------------------------------
// Matrix products

// sum + w * x, with one rounding per element. gcc would turn a loop over `fused` into this
// instruction too late to keep a tile's sums in registers.
INLINE Vector multiply_add(Vector w, float x, Vector sum)
{
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(w, _mm512_set1_ps(x), sum);
#elif defined(__AVX__) && defined(__FMA__)
    return _mm256_fmadd_ps(w, _mm256_set1_ps(x), sum);
#else
    for (int i = 0; i < LANES; i++)
        sum[i] = fused(w[i], x, sum[i]);
    return sum;
#endif
}

// y [rows, count * LANES] += x [rows, K] w [K, count * LANES]. X, W and Y are the row strides. The
// numbers at distance `ahead` from w will be needed soon, so they are prefetched.
INLINE void multiply(
    const float *x, int64_t X, const float *w, int64_t W, int64_t ahead, int64_t K, int rows,
    int count, float *y, int64_t Y)
{
    Vector sum[ROWS][SUMS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < count; v++)
            sum[r][v] = (Vector){0};
    for (int64_t k = 0; k < K; k++)
        for (int v = 0; v < count; v++) {
            const float *vector = w + k * W + v * LANES;
            __builtin_prefetch(vector + ahead, 0, 2); // into the L2 cache
            for (int r = 0; r < rows; r++)
                sum[r][v] = multiply_add(*(const Vector *)vector, x[r * X + k], sum[r][v]);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < count; v++)
            *(Vector *)(y + r * Y + v * LANES) += sum[r][v];
}

// Call f with 1, 2, 4 or ROWS of the remaining rows. This number is a compile-time constant, so f's
// loops unroll and its sums stay in registers.
#define ROWS_AT_ONCE(rows, left, f, ...) \
    { \
        for (rows = ROWS; rows > (left);) \
            rows /= 2; \
        switch (rows) { \
        case 1: f(1, __VA_ARGS__); break; \
        case 2: f(2, __VA_ARGS__); break; \
        case 4: f(4, __VA_ARGS__); break; \
        default: f(ROWS, __VA_ARGS__); \
        } \
    }

// -------------------------------------------------------------------------------------------------
// Attention

enum { TILE = 16 }; // number of keys at a time, all in one block

// Online softmax (Milakov and Gimelshein 2018) for a query at `position`: convert the scores of n
// keys, from position `start` on, to weights. Returns the factor by which earlier sums must be
// multiplied.
INLINE float online_softmax(
    const Op *op, int64_t position, int64_t start, int64_t n, float *score, float *top,
    float *total)
{
    int64_t first = op->window ? position + 1 - op->window - start : 0;
    int64_t end = least(n, position + 1 - start);
    float before = *top;
    for (int j = 0; j < TILE; j++) {
        if (op->cap)
            score[j] = capped(score[j], op->cap);
        score[j] = j >= first && j < end ? score[j] : -INFINITY;
    }
    for (int j = 0; j < TILE; j++)
        *top = score[j] > *top ? score[j] : *top;
    float sum = 0;
    for (int j = 0; j < TILE; j++)
        score[j] = exponential(score[j] - *top);
    for (int j = 0; j < TILE; j++)
        sum += score[j];
    float shrink = exponential(before - *top);
    *total = *total * shrink + sum;
    return shrink;
}

// Index among all heads of a KV head's query i: a row has `heads` heads, and G query heads per KV
// head.
INLINE int64_t query(int64_t i, int64_t G, int64_t heads, int64_t head)
{
    return i / G * heads + head * G + i % G;
}

// Attention of a KV head's queries i .. i + count, all from one request.
INLINE void attend_queries(const int count, const Op *op, int64_t i, int64_t head)
{
    int64_t D = op->D, S = op->S, H = op->H, Hk = op->Hk, G = H / Hk, n;
    int64_t wide = divide_up(D, TILE) * TILE, last = op->positions[(i + count - 1) / G];
    const int32_t *table = op->tables + op->requests[i / G] * op->M;
    float q[ROWS * D], y[ROWS * wide], top[ROWS], total[ROWS] = {0};
    memset(y, 0, sizeof y);
    for (int c = 0; c < count; c++) {
        top[c] = -1e30f;
        const float *x = op->x + query(i + c, G, H + 2 * Hk, head) * D;
        for (int64_t d = 0; d < D; d++)
            q[c * D + d] = x[d] * op->factor;
    }
    int64_t start = op->window ? op->positions[i / G] + 1 - op->window : 0;
    start = start < 0 ? 0 : start - start % S % TILE;
    for (; start <= last; start += n) {
        n = least(least(S - start % S, TILE), last + 1 - start); // not past the block's end
        int64_t block = table[start / S], ahead = table[least(start + n, last) / S] - block;
        const float *k = op->kv + (block * Hk + head) * S * D + start % S;
        // k is a column of [D, S], and v is a row of [S, D]
        const float *v = k + op->k_to_v + start % S * (D - 1);
        // scores beyond n, and numbers of y beyond D, are garbage and never read
        float score[ROWS * TILE] = {0};
        ahead *= Hk * S * D;
        multiply(q, D, k, S, ahead, D, count, TILE / LANES, score, TILE);
        for (int c = 0; c < count; c++) {
            int64_t position = op->positions[(i + c) / G];
            float shrink = online_softmax(
                op, position, start, n, score + c * TILE, top + c, total + c);
            for (int64_t d = 0; d < wide; d++)
                y[c * wide + d] *= shrink;
        }
        for (int64_t d = 0; d < wide; d += TILE)
            multiply(score, TILE, v + d, D, ahead, n, count, TILE / LANES, y + d, wide);
    }
    for (int c = 0; c < count; c++)
        for (int64_t d = 0; d < D; d++)
            op->y[query(i + c, G, H, head) * D + d] = y[c * wide + d] / total[c];
}

// Number of rows per task: one if there are few rows, else up to a tile's rows.
static int64_t rows_together(int64_t R) { return least(divide_up(R, 16), ROWS); }

// y [R, H D]: in the task's rows of x [R, (H + 2 Hk) D], the G query heads that share a KV head
// attend to all positions that they may see, through the block tables.
static void attend(const Op *op, int64_t R, int64_t task)
{
    int64_t G = op->H / op->Hk, r = task / op->Hk * rows_together(R);
    int64_t end = least(r + rows_together(R), R);
    for (int64_t stop; r < end; r = stop) { // the rows of one request
        for (stop = r; stop < end && op->requests[stop] == op->requests[r];)
            stop++;
        int count;
        for (int64_t i = r * G; i < stop * G; i += count)
            ROWS_AT_ONCE(count, stop * G - i, attend_queries, op, i, task % op->Hk)
    }
}

// -------------------------------------------------------------------------------------------------
// Linear layers: y [R, N] = activation(x [R, K] weight^T + bias)
//
// Weights are stored in zero-padded panels of 32 outputs. In fp32, they are [N / 32, K, 32], so a
// vector holds weights for one input. Integers are [N / 32, 32, K], so a vector holds weights for
// one output.

enum { ROW_BLOCK = 128, K_BLOCK = 256 }; // rows per task; inputs per partial sum

// y = `rows` rows of x [.., K] times the weights w [.., K] for `count` outputs. The compiler turns
// this into multiply-adds of pairs of 16-bit numbers (vpmaddwd).
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

// y [rows, PANEL] += inputs k .. k + block of the rows from r on, times output n's panel.
INLINE void multiply_panel(
    const int rows, const Op *op, int64_t r, int64_t n, int64_t k, int64_t block, float *y)
{
    int64_t K = op->K;
    const int most = SUMS / rows, count = most < PANEL / LANES ? most : PANEL / LANES;
    // prefetch fp32 weights 64 inputs ahead, and integers 3 KB ahead; twice as far was not faster
    // when measured
    if (!op->scale) {
        const float *w = op->weight + n * K + k * PANEL, *x = op->x + r * K + k;
        for (int c = 0; c < PANEL; c += count * LANES)
            multiply(x, K, w + c, PANEL, 64 * PANEL, block, rows, count, y + c, PANEL);
        return;
    }
    const int outputs = most < 4 ? most : 4;
    int32_t sums[ROWS * PANEL];
    for (int c = 0; c < PANEL; c += outputs) {
        const int8_t *w = op->weight8 + (n + c) * K;
        for (int64_t ahead = 0; ahead < outputs * K; ahead += 64)
            __builtin_prefetch(w + 3072 + ahead);
        tile_int8(w, op->x16 + r * K, K, rows, outputs, sums + c);
    }
    for (int i = 0; i < rows * PANEL; i++)
        y[i] = (float)sums[i] * (op->scale[n + i % PANEL] * op->x_scale[r + i / PANEL]);
}

// y [stop - r, PANEL] = rows r .. stop times output n's panel.
static void multiply_rows(const Op *op, int64_t r, int64_t stop, int64_t n, float *y)
{
    int64_t K = op->K, block = op->scale ? K : K_BLOCK;
    memset(y, 0, (stop - r) * PANEL * sizeof *y);
    for (int64_t k = 0; k < K; k += block) {
        int rows;
        for (int64_t i = r; i < stop; i += rows) {
            float *sums = y + (i - r) * PANEL;
            ROWS_AT_ONCE(
                rows, stop - i, multiply_panel, op, i, n, k, least(K - k, block), sums)
        }
    }
}

// Finish outputs n .. n + PANEL of a row: add the bias, apply the activation, multiply by `up` if
// the layer is gated, and apply the soft cap.
static void finish(const Op *op, int64_t n, float *gate, float *up, float *y)
{
    int64_t count = least(op->N - n, PANEL);
    if (op->bias)
        for (int64_t i = 0; i < count; i++) {
            gate[i] += op->bias[n + i];
            if (op->gated)
                up[i] += op->bias[op->N + n + i];
        }
    activate(op->activation, gate);
    if (op->gated)
        for (int i = 0; i < PANEL; i++)
            gate[i] *= up[i];
    if (op->cap)
        for (int i = 0; i < PANEL; i++)
            gate[i] = capped(gate[i], op->cap);
    memcpy(y, gate, count * sizeof *y);
}

// Number of outputs per task: whole panels, for about 8 tasks per thread.
static int64_t width(const Op *op, int threads)
{
    return divide_up(op->N, PANEL * 8 * threads) * PANEL;
}

static void linear(const Op *op, int64_t R, int64_t task, int threads)
{
    float gate[ROW_BLOCK * PANEL], up[ROW_BLOCK * PANEL];
    int64_t N = op->N, columns = width(op, threads), tasks = divide_up(N, columns);
    int64_t first = task % tasks * columns, start = task / tasks * ROW_BLOCK;
    int64_t stop = least(start + ROW_BLOCK, R);
    for (int64_t n = first; n < least(first + columns, N); n += PANEL) {
        multiply_rows(op, start, stop, n, gate);
        if (op->gated)
            multiply_rows(op, start, stop, divide_up(N, PANEL) * PANEL + n, up);
        for (int64_t r = start, i = 0; r < stop; r++, i += PANEL)
            finish(op, n, gate + i, up + i, op->y + r * N + n);
    }
}

// -------------------------------------------------------------------------------------------------
// The pool of threads

typedef struct Pool {
    int threads;   // number of threads, including the one that calls `run`
    pid_t process; // the process that the threads belong to
    const Op *ops; // operators of the current run
    int64_t count, R;
    atomic_int *counts; // [count, threads + 1] tasks begun in each thread's share; all tasks done
    atomic_int state; // OPEN (while workers may enter) plus the number of workers inside
    atomic_int runs;  // number of runs so far; -1: the pool is closed
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t workers[];
} Pool;

enum { OPEN = 1 << 16, PATIENCE = 2000 }; // number of looks before a thread yields to others

#ifndef WORTH_SHARING           // tests share even the smallest steps
#define WORTH_SHARING (1 << 20) // number of multiplications; one thread takes 30 us
#endif

enum { ATTEND = 8, LINEAR = 9 }; // as in KINDS in cpu.py; earlier ones compute one row per task

static void (*const operators[])(const Op *, int64_t) = {
    embed, rotation, add_norm, quantize_row, heads, exponentials, log_softmax, choose};

static int64_t num_tasks(const Op *op, int64_t R, int threads)
{
    if (op->kind == LINEAR)
        return divide_up(R, ROW_BLOCK) * divide_up(op->N, width(op, threads));
    return op->kind == ATTEND ? divide_up(R, rows_together(R)) * op->Hk : R;
}

static void compute(const Op *op, int64_t R, int64_t task, int threads)
{
    switch (op->kind) {
    case LINEAR: linear(op, R, task, threads); break;
    case ATTEND: attend(op, R, task); break;
    default: operators[op->kind](op, task);
    }
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

// Compute a run's operators, as thread `me`. For each operator, a thread first takes its own share
// of the tasks, because their data may be in its cache, and then tasks that other threads have not
// begun. So a thread never waits for another thread that is late, only for tasks that have begun.
static void take_part(Pool *pool, int me)
{
    int64_t R = pool->R, threads = pool->threads;
    atomic_int *next = pool->counts;
    for (const Op *op = pool->ops; op < pool->ops + pool->count; op++, next += threads + 1) {
        int64_t task, tasks = num_tasks(op, R, threads), did = 0;
        for (int64_t t = 0; t < threads; t++) {
            int64_t owner = (me + t) % threads, first = tasks * owner / threads;
            int64_t share = tasks * (owner + 1) / threads - first;
            for (; (task = atomic_fetch_add(next + owner, 1)) < share; did++)
                compute(op, R, first + task, threads);
        }
        atomic_fetch_add(next + threads, did);
        for (int looks = 0; atomic_load(next + threads) < tasks; looks++)
            pause_for(looks);
    }
}

// Wait for the run after `seen`, and return its number. Look for it for a while, then sleep.
static int wait_for_run(Pool *pool, int seen)
{
    for (int looks = 0; looks < PATIENCE && atomic_load(&pool->runs) == seen; looks++)
        pause_for(looks);
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
    Pool *pool = argument;
    for (int run = 0; (run = wait_for_run(pool, run)) >= 0;) {
        int entered = atomic_fetch_add(&pool->state, 1);
        if (entered & OPEN)
            take_part(pool, entered - OPEN + 1); // its first share; two threads may have the same
        atomic_fetch_sub(&pool->state, 1);
    }
    return NULL;
}

// A forked process does not have the threads, but it has their lock, which a thread may have held.
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

// Open a pool of this many threads, or fewer if the system does not allow as many.
Pool *open_pool(int threads)
{
    Pool *pool = calloc(1, sizeof *pool + threads * sizeof *pool->workers);
    notice_fork(pool);
    while (pool->threads < threads &&
           !pthread_create(pool->workers + pool->threads, NULL, work, pool))
        pool->threads++;
    return pool;
}

void close_pool(Pool *pool)
{
    notice_fork(pool);
    announce(pool, -1);
    for (int t = 1; t < pool->threads; t++)
        pthread_join(pool->workers[t], NULL);
    free(pool->counts);
    free(pool);
}

// Compute `count` operators for R rows, in order.
void run(Pool *pool, const Op *ops, int64_t count, int64_t R)
{
    notice_fork(pool);
    int64_t products = 0, size = count * (pool->threads + 1) * sizeof *pool->counts;
    pool->counts = realloc(pool->counts, size);
    memset(pool->counts, 0, size);
    for (const Op *op = ops; op < ops + count; op++)
        products += R * (op->N * op->K + op->M * op->S * op->H * op->D);
    pool->ops = ops;
    pool->count = count;
    pool->R = R;
    if (products > WORTH_SHARING) {
        atomic_fetch_or(&pool->state, OPEN);
        announce(pool, atomic_load(&pool->runs) % INT32_MAX + 1);
    }
    take_part(pool, 0);
    atomic_fetch_and(&pool->state, ~OPEN);
    // workers that have entered still read the counts
    for (int looks = 0; atomic_load(&pool->state); looks++)
        pause_for(looks);
}
