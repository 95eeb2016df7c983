/*
The processes that train one model ("ranks"): who they are, and what they agree on through small messages. Arrays on
the device are dist.h's.

A rank is found in one of three ways, in this order:
  MPI          started by mpirun, or by srun with MPI support
  environment  RANK and WORLD_SIZE, or Slurm's SLURM_PROCID and SLURM_STEP_NUM_TASKS; the ranks meet by TCP at
               MASTER_ADDR:MASTER_PORT (rendezvous.h). Only where the device has its own network (NCCL).
  alone        one process, which needs neither
Every function but ranks_init is collective: all ranks call it, in the same order. With one rank all of them return
at once. An error on one rank ends all of them: fatal() then says which rank it was.
*/
#ifndef RANKS_H
#define RANKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../util.h"

typedef struct {
    size_t rank, size;
    size_t local_rank, local_size;  // among the ranks on this host
    size_t hosts;
    size_t threads;   // OpenMP threads of this rank; 0: OpenMP's own choice
    bool bound;       // the launcher has given every rank cores of its own, and left others idle
    const char* way;  // "alone", "MPI", "environment"
} Ranks;

// Valid after ranks_init.
EXTERN_C Ranks ranks;

// Finds out who this rank is, meets the others and divides the cores of a host among its ranks, unless OMP_NUM_THREADS
// is set. needs_mpi: the device has no network of its own, so that ranks without MPI are an error.
EXTERN_C void ranks_init(bool needs_mpi);

// The orderly end: waits for all. A process that ends without it ends the others too.
EXTERN_C void ranks_finish(void);

// all[size][bytes] = what each rank has in mine[bytes], in the order of ranks; the same on every rank.
EXTERN_C void ranks_all_gather(void* all, const void* mine, size_t bytes);

// data[bytes] of rank 0 to all.
EXTERN_C void ranks_broadcast(void* data, size_t bytes);

EXTERN_C void ranks_barrier(void);

// Largest value of any rank.
EXTERN_C int ranks_max(int value);

// Ends the job unless all ranks have the same bytes here, `what` being what they are.
EXTERN_C void ranks_check_same(const char* what, const void* data, size_t bytes);

#endif
