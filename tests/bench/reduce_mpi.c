/* SPDX-License-Identifier: Apache-2.0 */
/* reduce_mpi BYTES TURNS, under mpirun: the time of MPI's all-reduce of floats, one line of
 * milliseconds a turn. Built by tests/bench/reduce.sh with mpicc; no part of Belay. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    if (argc < 3) {
        return 2;
    }
    size_t elems = strtoull(argv[1], NULL, 10) / sizeof(float);
    int rank, turns = atoi(argv[2]);
    float *data = aligned_alloc(2u << 20, elems * sizeof *data);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (data != NULL) { /* huge pages, as Belay's buffers have them */
        (void)!madvise(data, elems * sizeof *data, MADV_HUGEPAGE);
    }
    for (int turn = 0; data != NULL && turn <= turns; turn++) {
        for (size_t i = 0; i < elems; i++) {
            data[i] = (float)(rank + 1);
        }
        MPI_Barrier(MPI_COMM_WORLD);
        double begun = MPI_Wtime();
        MPI_Allreduce(MPI_IN_PLACE, data, (int)elems, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        MPI_Barrier(MPI_COMM_WORLD);
        if (rank == 0 && turn > 0) { /* the first one warms up */
            printf("%.3f\n", 1000 * (MPI_Wtime() - begun));
        }
    }
    free(data);
    return MPI_Finalize();
}
