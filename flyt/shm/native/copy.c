// SPDX-License-Identifier: Apache-2.0
// The copy engine: one memmove by several threads that stay.
//
// A copy is cut into pieces that the caller and the engine's threads fetch one by one, so a thread
// that wakes late costs nothing. Between two copies a thread spins for a while (where the machine has
// processors to spare) and then sleeps.

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct job {
    char *dst;
    const char *src;
    size_t size, piece;
    _Atomic size_t next; // where the next piece begins
    int helpers;         // threads at work on it; guarded by the engine's lock
    struct job *link;
} job_t;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    job_t *jobs;
    _Atomic uint64_t posted; // jobs so far: what an idle thread spins on
    _Atomic int closing;
    int count;
    uint64_t spin_ns;
    pthread_t threads[];
} engine_t;

static void copy_pieces(job_t *job) {
    size_t at;
    while ((at = atomic_fetch_add_explicit(&job->next, job->piece, memory_order_relaxed)) < job->size) {
        size_t left = job->size - at;
        memcpy(job->dst + at, job->src + at, left < job->piece ? left : job->piece);
    }
}

static job_t *unfinished(engine_t *engine) {
    for (job_t *job = engine->jobs; job; job = job->link)
        if (atomic_load_explicit(&job->next, memory_order_relaxed) < job->size)
            return job;
    return NULL;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void spin(engine_t *engine, uint64_t seen) {
    uint64_t end = now_ns() + engine->spin_ns;
    while (atomic_load_explicit(&engine->posted, memory_order_relaxed) == seen &&
           !atomic_load_explicit(&engine->closing, memory_order_relaxed) && now_ns() < end)
        sched_yield();
}

static void *serve(void *argument) {
    engine_t *engine = argument;
    pthread_mutex_lock(&engine->lock);
    while (!engine->closing) {
        job_t *job = unfinished(engine);
        if (!job) {
            uint64_t seen = engine->posted;
            if (engine->spin_ns) {
                pthread_mutex_unlock(&engine->lock);
                spin(engine, seen);
                pthread_mutex_lock(&engine->lock);
            }
            if (engine->posted == seen && !engine->closing)
                pthread_cond_wait(&engine->work, &engine->lock);
            continue;
        }
        job->helpers++;
        pthread_mutex_unlock(&engine->lock);
        copy_pieces(job);
        pthread_mutex_lock(&engine->lock);
        if (!--job->helpers)
            pthread_cond_broadcast(&engine->done);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

void flyt_engine_close(engine_t *engine) {
    pthread_mutex_lock(&engine->lock);
    engine->closing = 1;
    pthread_cond_broadcast(&engine->work);
    pthread_mutex_unlock(&engine->lock);
    for (int i = 0; i < engine->count; i++)
        pthread_join(engine->threads[i], NULL);
    pthread_cond_destroy(&engine->work);
    pthread_cond_destroy(&engine->done);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

// An engine with `helpers` threads beside the caller's; with fewer if the system grants no more.
engine_t *flyt_engine_open(int helpers, uint64_t spin_ns) {
    engine_t *engine = calloc(1, sizeof(engine_t) + (size_t)helpers * sizeof(pthread_t));
    if (!engine)
        return NULL;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->work, NULL);
    pthread_cond_init(&engine->done, NULL);
    engine->spin_ns = spin_ns;
    // Signals are for the program's own threads: one that a helper took would wake nobody.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; i < helpers; i++, engine->count++)
        if (pthread_create(&engine->threads[i], NULL, serve, engine))
            break;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return engine;
}

// Copy between ranges that don't overlap; returns when the last byte is in place.
void flyt_engine_copy(engine_t *engine, char *dst, const char *src, size_t size, size_t piece) {
    job_t job = {.dst = dst, .src = src, .size = size, .piece = piece};
    pthread_mutex_lock(&engine->lock);
    job.link = engine->jobs;
    engine->jobs = &job;
    engine->posted++;
    pthread_cond_broadcast(&engine->work);
    pthread_mutex_unlock(&engine->lock);
    copy_pieces(&job);
    pthread_mutex_lock(&engine->lock);
    job_t **at = &engine->jobs;
    while (*at != &job)
        at = &(*at)->link;
    *at = job.link;
    while (job.helpers)
        pthread_cond_wait(&engine->done, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
}
