/* SPDX-License-Identifier: Apache-2.0 */
/* The lower half mpi: compiled by an MPI's own mpicc, it turns Flyt's constants into that MPI's. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#include "lower.h"

/* Flyt's, as in include/mpi.h, which can't be included beside the library's own. */
enum { F_ANY_SOURCE = -1001, F_ANY_TAG = -1002, F_PROC_NULL = -1003 };
#define F_IN_PLACE ((const void *)-1)

struct status {
    int source, tag, error;
};

static MPI_Comm comm_of(int handle) {
    return handle == 1 ? MPI_COMM_WORLD : handle == 2 ? MPI_COMM_SELF : MPI_COMM_NULL;
}

static MPI_Datatype type_of(int handle) {
    const MPI_Datatype known[] = {MPI_DATATYPE_NULL, MPI_BYTE, MPI_CHAR, MPI_SHORT, MPI_INT, MPI_LONG,
                                  MPI_LONG_LONG, MPI_UNSIGNED_CHAR, MPI_UNSIGNED, MPI_UNSIGNED_LONG,
                                  MPI_FLOAT, MPI_DOUBLE, MPI_INT64_T, MPI_UINT64_T};
    return handle < 0 || handle >= (int)(sizeof known / sizeof *known) ? MPI_DATATYPE_NULL : known[handle];
}

static MPI_Op op_of(int handle) {
    const MPI_Op known[] = {MPI_OP_NULL, MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX,
                            MPI_LAND, MPI_LOR, MPI_BAND, MPI_BOR, MPI_BXOR};
    return handle < 0 || handle >= (int)(sizeof known / sizeof *known) ? MPI_OP_NULL : known[handle];
}

static int rank_of(int rank) {
    return rank == F_ANY_SOURCE ? MPI_ANY_SOURCE : rank == F_PROC_NULL ? MPI_PROC_NULL : rank;
}

static int tag_of(int tag) { return tag == F_ANY_TAG ? MPI_ANY_TAG : tag; }

/* What a restart makes again. */
static struct {
    int initialised, threads, rank, size;
} state;

/* Ranks that another MPI's launcher has started don't find each other: each would be rank 0 of 1. */
static void check_launcher(void) {
    const char *sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
    for (int i = 0; i < 2; i++) {
        const char *launched = getenv(sizes[i]);
        if (!launched || atoi(launched) <= 1 || state.size != 1)
            continue;
        fprintf(stderr, "flyt split: mpi_lh: %s=%s, but this MPI sees one rank: start it with the mpirun of the "
                        "same MPI as --half mpi=...\n", sizes[i], launched);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static int note(int result, int threads) {
    if (result == MPI_SUCCESS) {
        state.initialised = 1;
        state.threads = threads;
        MPI_Comm_rank(MPI_COMM_WORLD, &state.rank);
        MPI_Comm_size(MPI_COMM_WORLD, &state.size);
        check_launcher();
    }
    return result;
}

int lower_MPI_Init(int *argc, char ***argv) { return note(MPI_Init(argc, argv), MPI_THREAD_SINGLE); }

int lower_MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    const int levels[] = {MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE};
    int wanted = required < 0 || required > 3 ? MPI_THREAD_MULTIPLE : levels[required], got = wanted;
    int result = note(MPI_Init_thread(argc, argv, wanted, &got), wanted);
    for (int level = 0; level < 4; level++)
        if (levels[level] == got)
            *provided = level;
    return result;
}

/* By what the program has done: after a restart the library may not have been initialised. */
int lower_MPI_Initialized(int *flag) { return *flag = state.initialised != 0, MPI_SUCCESS; }
int lower_MPI_Finalized(int *flag) { return *flag = state.initialised < 0, MPI_SUCCESS; }

int lower_MPI_Finalize(void) {
    int result = MPI_Finalize();
    if (result == MPI_SUCCESS)
        state.initialised = -1;
    return result;
}

int lower_MPI_Abort(int comm, int code) { return MPI_Abort(comm_of(comm), code); }
int lower_MPI_Comm_size(int comm, int *size) { return MPI_Comm_size(comm_of(comm), size); }
int lower_MPI_Comm_rank(int comm, int *rank) { return MPI_Comm_rank(comm_of(comm), rank); }
int lower_MPI_Barrier(int comm) { return MPI_Barrier(comm_of(comm)); }

int lower_MPI_Send(const void *buffer, int count, int type, int to, int tag, int comm) {
    return MPI_Send(buffer, count, type_of(type), rank_of(to), tag, comm_of(comm));
}

int lower_MPI_Recv(void *buffer, int count, int type, int from, int tag, int comm, struct status *status) {
    MPI_Status found;
    int result = MPI_Recv(buffer, count, type_of(type), rank_of(from), tag_of(tag), comm_of(comm), &found);
    if (status)
        *status = (struct status){found.MPI_SOURCE == MPI_PROC_NULL ? F_PROC_NULL : found.MPI_SOURCE,
                                  found.MPI_TAG == MPI_ANY_TAG ? F_ANY_TAG : found.MPI_TAG, result};
    return result;
}

int lower_MPI_Bcast(void *buffer, int count, int type, int root, int comm) {
    return MPI_Bcast(buffer, count, type_of(type), rank_of(root), comm_of(comm));
}

int lower_MPI_Allreduce(const void *from, void *to, int count, int type, int op, int comm) {
    return MPI_Allreduce(from == F_IN_PLACE ? MPI_IN_PLACE : from, to, count, type_of(type), op_of(op), comm_of(comm));
}

int lower_MPI_Get_library_version(char *version, int *length) { return MPI_Get_library_version(version, length); }

const char *lower_start(void) { return NULL; }

const char *lower_save(split_put put) {
    put(&state, sizeof state);
    return NULL;
}

const char *lower_restore(split_get get) {
    static char problem[128];
    int got, rank, size;
    get(&state, sizeof state);
    if (state.initialised <= 0)
        return NULL; /* not yet, or MPI_Finalize has been called: then there is nothing more to ask of it */
    if (MPI_Init_thread(NULL, NULL, state.threads, &got) != MPI_SUCCESS || got < state.threads)
        return "MPI_Init_thread fails";
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (rank == state.rank && size == state.size)
        return NULL;
    snprintf(problem, sizeof problem, "the image is of rank %d of %d, this process is rank %d of %d",
             state.rank, state.size, rank, size);
    return problem;
}
