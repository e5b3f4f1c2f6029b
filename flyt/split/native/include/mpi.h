/* SPDX-License-Identifier: Apache-2.0 */
/* MPI for an upper half: the handles are plain numbers, whichever library is in the lower half. */
#ifndef FLYT_SPLIT_MPI_H
#define FLYT_SPLIT_MPI_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { MPI_COMM_NULL, MPI_COMM_WORLD, MPI_COMM_SELF } MPI_Comm;

typedef enum {
    MPI_DATATYPE_NULL,
    MPI_BYTE,
    MPI_CHAR,
    MPI_SHORT,
    MPI_INT,
    MPI_LONG,
    MPI_LONG_LONG,
    MPI_UNSIGNED_CHAR,
    MPI_UNSIGNED,
    MPI_UNSIGNED_LONG,
    MPI_FLOAT,
    MPI_DOUBLE,
    MPI_INT64_T,
    MPI_UINT64_T
} MPI_Datatype;

typedef enum {
    MPI_OP_NULL,
    MPI_SUM,
    MPI_PROD,
    MPI_MIN,
    MPI_MAX,
    MPI_LAND,
    MPI_LOR,
    MPI_BAND,
    MPI_BOR,
    MPI_BXOR
} MPI_Op;

typedef struct {
    int MPI_SOURCE, MPI_TAG, MPI_ERROR;
} MPI_Status;

#define MPI_SUCCESS 0
#define MPI_ANY_SOURCE (-1001)
#define MPI_ANY_TAG (-1002)
#define MPI_PROC_NULL (-1003)
#define MPI_IN_PLACE ((void *)-1)
#define MPI_STATUS_IGNORE ((MPI_Status *)0)
#define MPI_MAX_LIBRARY_VERSION_STRING 8192 /* the larger of the two */

#define MPI_THREAD_SINGLE 0
#define MPI_THREAD_FUNNELED 1
#define MPI_THREAD_SERIALIZED 2
#define MPI_THREAD_MULTIPLE 3

int MPI_Init(int *argc, char ***argv);
int MPI_Init_thread(int *argc, char ***argv, int required, int *provided);
int MPI_Initialized(int *flag);
int MPI_Finalize(void);
int MPI_Finalized(int *flag);
int MPI_Abort(MPI_Comm comm, int errorcode);
int MPI_Comm_size(MPI_Comm comm, int *size);
int MPI_Comm_rank(MPI_Comm comm, int *rank);
int MPI_Barrier(MPI_Comm comm);
int MPI_Send(const void *buf, int count, MPI_Datatype datatype, int dest, int tag, MPI_Comm comm);
int MPI_Recv(void *buf, int count, MPI_Datatype datatype, int source, int tag, MPI_Comm comm, MPI_Status *status);
int MPI_Bcast(void *buffer, int count, MPI_Datatype datatype, int root, MPI_Comm comm);
int MPI_Allreduce(const void *sendbuf, void *recvbuf, int count, MPI_Datatype datatype, MPI_Op op, MPI_Comm comm);
int MPI_Get_library_version(char *version, int *resultlen);

#ifdef __cplusplus
}
#endif
#endif
