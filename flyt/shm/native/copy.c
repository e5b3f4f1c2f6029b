// SPDX-License-Identifier: Apache-2.0
// The copy engine: memmove by several threads that stay.
//
// A copy is cut into pieces that the engine's threads, and whoever waits for it, fetch one by one: a
// thread that wakes late costs nothing. Copies form a queue, so that the threads go on to the next one
// while the last pieces of the one before are under way. Without work a thread spins for a while (where
// the machine has processors to spare) and then sleeps.
//
// Large copies are streamed: what is stored goes past the caches, so that its lines need not be read from memory first
// (half as many bytes again), and what the program has in its caches stays there.

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { LINE = 64, AHEAD = 8 * LINE };

typedef struct job {
    char *dst;
    const char *src;
    size_t size, piece;
    int streams;
    _Atomic size_t next;  // where the next piece begins
    _Atomic int helpers;  // threads at work on it; changed under the engine's lock
    struct job *link;     // the next one in the queue
} job_t;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    job_t *jobs; // in the order of their posting
    _Atomic uint64_t posted; // jobs so far: what an idle thread spins on
    _Atomic int closing;
    int count;
    uint64_t spin_ns;
    pthread_t threads[];
} engine_t;

// memcpy past the caches, where the processor has the stores for it.
void flyt_stream(char *dst, const char *src, size_t size) {
#ifdef __SSE2__
    size_t head = -(uintptr_t)dst % LINE;
    if (size < head + LINE) {
        memcpy(dst, src, size);
        return;
    }
    memcpy(dst, src, head);
    dst += head, src += head, size -= head;
    for (; size >= LINE; dst += LINE, src += LINE, size -= LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)src), b = _mm_loadu_si128((const __m128i *)(src + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(src + 32)), d = _mm_loadu_si128((const __m128i *)(src + 48));
        _mm_prefetch(src + AHEAD, _MM_HINT_NTA);
        _mm_stream_si128((__m128i *)dst, a);
        _mm_stream_si128((__m128i *)(dst + 16), b);
        _mm_stream_si128((__m128i *)(dst + 32), c);
        _mm_stream_si128((__m128i *)(dst + 48), d);
    }
    _mm_sfence(); // who hears that the copy is done finds the bytes
#endif
    memcpy(dst, src, size);
}

static void copy_pieces(job_t *job) {
    size_t at;
    while ((at = atomic_fetch_add_explicit(&job->next, job->piece, memory_order_relaxed)) < job->size) {
        size_t left = job->size - at;
        size_t size = left < job->piece ? left : job->piece;
        if (job->streams)
            flyt_stream(job->dst + at, job->src + at, size);
        else
            memcpy(job->dst + at, job->src + at, size);
    }
}

// The first job that has pieces left, not beyond `last`.
static job_t *unfinished(engine_t *engine, const job_t *last) {
    for (job_t *job = engine->jobs; job; job = job == last ? NULL : job->link)
        if (atomic_load_explicit(&job->next, memory_order_relaxed) < job->size)
            return job;
    return NULL;
}

// Under the lock, which is let go meanwhile.
static void help(engine_t *engine, job_t *job) {
    job->helpers++;
    pthread_mutex_unlock(&engine->lock);
    copy_pieces(job);
    pthread_mutex_lock(&engine->lock);
    if (!--job->helpers)
        pthread_cond_broadcast(&engine->done);
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
        job_t *job = unfinished(engine, NULL);
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
        help(engine, job);
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

size_t flyt_engine_job_size(void) { return sizeof(job_t); }

// Queue a copy between ranges that don't overlap. They, and `job`, stay until flyt_engine_wait returns.
void flyt_engine_post(engine_t *engine, job_t *job, char *dst, const char *src, size_t size, size_t piece, int streams) {
    *job = (job_t){.dst = dst, .src = src, .size = size, .piece = piece, .streams = streams};
    pthread_mutex_lock(&engine->lock);
    job_t **at = &engine->jobs;
    while (*at)
        at = &(*at)->link;
    *at = job;
    engine->posted++;
    pthread_cond_broadcast(&engine->work);
    pthread_mutex_unlock(&engine->lock);
}

// Help until the last byte of a copy is in place. At once if it was waited for already, or never posted (its
// memory is zero then): an interrupt may have struck before or after.
void flyt_engine_wait(engine_t *engine, job_t *job) {
    pthread_mutex_lock(&engine->lock);
    if (atomic_load_explicit(&job->next, memory_order_relaxed) < job->size)
        for (job_t *first; (first = unfinished(engine, job));)
            help(engine, first);
    job_t **at = &engine->jobs;
    while (*at && *at != job)
        at = &(*at)->link;
    if (*at)
        *at = job->link;
    if (engine->spin_ns && job->helpers) { // a piece's time, less than a sleep and a wake-up
        pthread_mutex_unlock(&engine->lock);
        uint64_t end = now_ns() + engine->spin_ns;
        while (job->helpers && now_ns() < end)
            sched_yield();
        pthread_mutex_lock(&engine->lock);
    }
    while (job->helpers)
        pthread_cond_wait(&engine->done, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
}
