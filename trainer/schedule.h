/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The learning rate: linear warm-up, then a cosine from lr to lr_min.
 */
#ifndef TRAIN_TRAINER_SCHEDULE_H
#define TRAIN_TRAINER_SCHEDULE_H

#include <stdint.h>

/* Rate of optimizer step `step` (1 is the first) of `steps`. Up to `warmup`: lr * step / warmup.
 * Then lr_min + (lr - lr_min) (1 + cos(pi x)) / 2 with x from 0 at step warmup to 1 at `steps`;
 * lr_min beyond. fp64, with our own cosine: the same bits everywhere. */
double train_lr_at(uint64_t step, uint64_t steps, uint64_t warmup, double lr, double lr_min);

#endif
