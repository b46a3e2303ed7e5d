/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/schedule.h"

#include "kernels/fmath.h"

double train_lr_at(uint64_t step, uint64_t steps, uint64_t warmup, double lr, double lr_min)
{
    if (step < warmup) {
        return lr * (double)step / (double)warmup;
    }
    if (step >= steps) {
        return lr_min;
    }
    double x = (double)(step - warmup) / (double)(steps - warmup);
    return lr_min + (lr - lr_min) * (0.5 * (1.0 + kern_cos(3.141592653589793 * x)));
}
