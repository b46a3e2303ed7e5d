/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/grid.h"

int train_grid_make(struct train_grid *ret, uint32_t rank, uint32_t world, uint32_t tp, uint32_t pp,
                    struct bl_errmsg *msg)
{
    uint64_t place = (uint64_t)tp * pp; /* ranks that hold one copy of the model together */
    if (place == 0 || world == 0 || world % place != 0) {
        return bl_err(msg, BL_ECONFIG,
                      "%u ranks are no whole number of copies of the model on tp %u x pp %u ranks",
                      world, tp, pp);
    }
    if (rank >= world) {
        return bl_err(msg, BL_ECONFIG, "rank %u is not one of %u", rank, world);
    }
    *ret = (struct train_grid){.rank = rank,
                               .world = world,
                               .tp = tp,
                               .pp = pp,
                               .dp = (uint32_t)(world / place),
                               .t = rank % tp,
                               .p = rank / tp % pp,
                               .d = (uint32_t)(rank / place)};
    return 0;
}

uint32_t train_grid_at(const struct train_grid *grid, uint32_t t, uint32_t p, uint32_t d)
{
    BL_ASSERT(t < grid->tp && p < grid->pp && d < grid->dp);
    return (d * grid->pp + p) * grid->tp + t;
}

void train_grid_tp_group(const struct train_grid *grid, uint32_t *ranks)
{
    for (uint32_t t = 0; t < grid->tp; t++) {
        ranks[t] = train_grid_at(grid, t, grid->p, grid->d);
    }
}

void train_grid_pp_group(const struct train_grid *grid, uint32_t *ranks)
{
    for (uint32_t p = 0; p < grid->pp; p++) {
        ranks[p] = train_grid_at(grid, grid->t, p, grid->d);
    }
}

void train_grid_dp_group(const struct train_grid *grid, uint32_t *ranks)
{
    for (uint32_t d = 0; d < grid->dp; d++) {
        ranks[d] = train_grid_at(grid, grid->t, grid->p, d);
    }
}

uint32_t train_grid_chunks(const struct train_grid *grid, uint32_t interleave, uint32_t layers)
{
    return grid->pp > 1 && interleave > 1 && (uint64_t)grid->pp * interleave <= layers ? interleave
                                                                                       : 1;
}
