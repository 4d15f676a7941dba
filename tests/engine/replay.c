/*
Computes once more what test_digest.py has recorded: calls of `run`, with the memory that their
operators name before and after each. Prints how many calls left the same; ends with 1 at the first
that did not.

    gcc -I ../.. replay.c -lm -pthread && ./a.out calls
*/

#include "ops/cpu.c"
#include <stdio.h>

typedef struct {
    int64_t place, size; // address in the process that recorded it, bytes
    char *memory;        // here
} Region;

enum { SLACK = 1 << 16 }; // bytes after a region, which the last panel may read

static void read_exactly(void *to, size_t size, FILE *file)
{
    if (fread(to, 1, size, file) != size) {
        printf("the file ends too early\n");
        exit(2);
    }
}

static Region read_region(FILE *file)
{
    Region region;
    read_exactly(&region, 2 * sizeof(int64_t), file);
    region.memory = calloc(1, region.size + SLACK);
    read_exactly(region.memory, region.size, file);
    return region;
}

// Let each pointer of an operator, all between `kind` and `N`, name the region here.
static void relocate(Op *op, const Region *regions, int64_t count)
{
    for (char **pointer = (char **)&op->x; (int64_t *)pointer < &op->N; pointer++)
        for (int64_t i = 0; i < count; i++)
            if (*pointer == (char *)regions[i].place) {
                *pointer = regions[i].memory;
                break;
            }
}

int main(int count, char **arguments)
{
    FILE *file = fopen(arguments[count - 1], "rb");
    Pool *pool = open_pool(2);
    int64_t head[4], calls = 0; // operators, rows, regions, bytes of an operator
    for (; fread(head, sizeof head, 1, file) == 1; calls++) {
        if (head[3] != sizeof(Op))
            return 2;
        Op *ops = calloc(head[0], sizeof(Op));
        Region *regions = calloc(head[2], sizeof(Region));
        read_exactly(ops, head[0] * sizeof(Op), file);
        for (int64_t i = 0; i < head[2]; i++)
            regions[i] = read_region(file);
        for (int64_t i = 0; i < head[0]; i++)
            relocate(ops + i, regions, head[2]);
        run(pool, ops, head[0], head[1]);
        for (int64_t i = 0; i < head[2]; i++) {
            Region after = read_region(file);
            if (memcmp(regions[i].memory, after.memory, after.size)) {
                printf("call %d of kind %d differs\n", (int)calls, (int)ops->kind);
                return 1;
            }
            free(after.memory);
        }
        for (int64_t i = 0; i < head[2]; i++)
            free(regions[i].memory);
        free(regions);
        free(ops);
    }
    close_pool(pool);
    printf("%d calls left the same\n", (int)calls);
    return 0;
}
