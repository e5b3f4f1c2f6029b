// SPDX-License-Identifier: Apache-2.0
// The copy engine: memmove by several threads that stay.
//
// A copy is cut into pieces that the engine's threads, and whoever waits for it, fetch one by one: a
// thread that wakes late costs nothing. Copies form a queue, so that the threads go on to the next one
// while the last pieces of the one before are under way. Without work a thread spins for a while (where
// the machine has processors to spare) and then sleeps.
//
// The queue is a ring of places, and no lock is on the way of a copy: at a mutex all threads would meet at each job's
// end, and in a guest waking those who slept over it takes longer than many pieces. A place's `left` holds the
// generation, odd while a job has the place, and how many pieces nobody has fetched. Who counts that down knows by
// the generation in the same word that the job is the one that it saw, and the job stays until its piece is finished.
// Who finishes the last piece moves the generation on: that ends the job and frees the place.
//
// The mutex is for sleeping only. Who wants to sleep says so, and then looks once more; who changes something does
// that first, and then looks for sleepers. These four are in one order for all (memory_order_seq_cst), so that one of
// the two sees the other; and since a sleeper holds the mutex from saying so until it sleeps, none misses its wake-up.
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

enum { LINE = 64, AHEAD = 8 * LINE, PLACES = 64 };

typedef struct {
    // Three lines: all threads write the first while there are pieces to fetch and the second as they finish them;
    // the third they only read.
    _Alignas(LINE) _Atomic uint64_t left;       // generation << 32 | pieces that nobody has fetched
    _Alignas(LINE) _Atomic uint32_t unfinished; // pieces that aren't copied yet
    _Alignas(LINE) char *dst;
    const char *src;
    size_t size, piece;
    uint32_t pieces;
    int streams;
} place_t;

typedef struct {
    uint32_t place, generation; // 0: never posted; a place's first job is of generation 1
} ticket_t;

typedef struct {
    place_t places[PLACES];
    _Alignas(LINE) _Atomic uint32_t next; // the place that is tried next, modulo PLACES: the oldest jobs are behind it
    _Alignas(LINE) _Atomic uint64_t posted; // jobs so far: what an idle thread spins on
    _Atomic int closing;
    _Alignas(LINE) _Atomic int idle; // threads that sleep until something is posted; changed under the lock
    _Atomic int waiting;             // and those that sleep until something is done
    uint64_t spin_ns;
    int count;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
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

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// After the change that the sleepers wait for.
static void wake(engine_t *engine, pthread_cond_t *sleepers) {
    pthread_mutex_lock(&engine->lock); // who has said that it sleeps does so now
    pthread_mutex_unlock(&engine->lock);
    pthread_cond_broadcast(sleepers); // outside: else they would wake up for the lock and sleep again
}

// The same for two of the idle threads, if any sleep, each of which wakes two others when it is awake: in a guest a
// wake-up costs who does it tens of microseconds, and whoever posts has its own pieces to copy.
static void wake_two(engine_t *engine) {
    if (!atomic_load(&engine->idle))
        return;
    pthread_mutex_lock(&engine->lock);
    pthread_mutex_unlock(&engine->lock);
    pthread_cond_signal(&engine->work);
    pthread_cond_signal(&engine->work);
}

static void finish_piece(engine_t *engine, place_t *place, uint32_t generation) {
    // Release: the piece's bytes, and what was read of the place, are behind us. Acquire: the last has those of all.
    if (atomic_fetch_sub_explicit(&place->unfinished, 1, memory_order_acq_rel) > 1)
        return;
    // Nobody else changes it: there is no piece left, and the place is not free. It hands on the bytes to who waits.
    atomic_store(&place->left, (uint64_t)(uint32_t)(generation + 1) << 32);
    if (atomic_load(&engine->waiting))
        wake(engine, &engine->done);
}

// Fetch pieces of the job that has the place, as long as there are any; whether there was one.
static int copy_pieces(engine_t *engine, place_t *place) {
    // Relaxed: it is only what to expect.
    uint64_t left = atomic_load_explicit(&place->left, memory_order_relaxed);
    uint32_t generation = (uint32_t)(left >> 32);
    int found = 0;
    while ((uint32_t)left && left >> 32 == generation) {
        // Acquire: the place's fields are those that were published with this generation.
        if (!atomic_compare_exchange_weak_explicit(&place->left, &left, left - 1, memory_order_acquire,
                                                   memory_order_relaxed))
            continue;
        size_t at = (place->pieces - (uint32_t)left) * place->piece, remains = place->size - at;
        size_t size = remains < place->piece ? remains : place->piece;
        if (place->streams)
            flyt_stream(place->dst + at, place->src + at, size);
        else
            memcpy(place->dst + at, place->src + at, size);
        finish_piece(engine, place, generation);
        found = 1;
        left = atomic_load_explicit(&place->left, memory_order_relaxed);
    }
    return found;
}

// Copy pieces of the first job that has any, in the order of posting and not beyond `last`; whether there was one.
static int help(engine_t *engine, const place_t *last) {
    // Relaxed: it decides on nothing but the order.
    uint32_t oldest = atomic_load_explicit(&engine->next, memory_order_relaxed);
    for (uint32_t i = 0; i < PLACES; i++) {
        place_t *place = &engine->places[(oldest + i) % PLACES];
        if (copy_pieces(engine, place))
            return 1;
        if (place == last)
            return 0;
    }
    return 0;
}

static int is_idle(engine_t *engine, uint64_t seen) {
    return atomic_load(&engine->posted) == seen && !atomic_load(&engine->closing);
}

// Until more than `seen` jobs were posted.
static void rest(engine_t *engine, uint64_t seen) {
    if (engine->spin_ns)
        for (uint64_t end = now_ns() + engine->spin_ns; now_ns() < end; sched_yield())
            if (!is_idle(engine, seen))
                return;
    pthread_mutex_lock(&engine->lock);
    atomic_fetch_add(&engine->idle, 1);
    while (is_idle(engine, seen))
        pthread_cond_wait(&engine->work, &engine->lock);
    atomic_fetch_sub(&engine->idle, 1);
    pthread_mutex_unlock(&engine->lock);
    wake_two(engine);
}

static void *serve(void *argument) {
    engine_t *engine = argument;
    while (!atomic_load_explicit(&engine->closing, memory_order_relaxed)) {
        // Before the look at the places. Acquire: the jobs that it counts are found there.
        uint64_t seen = atomic_load_explicit(&engine->posted, memory_order_acquire);
        if (!help(engine, NULL))
            rest(engine, seen);
    }
    return NULL;
}

// Copies that are queued still get finished. No other call may be under way, or follow.
void flyt_engine_close(engine_t *engine) {
    atomic_store(&engine->closing, 1);
    wake(engine, &engine->work);
    while (help(engine, NULL))
        ;
    for (int i = 0; i < engine->count; i++) // each ends after the piece that it is at
        pthread_join(engine->threads[i], NULL);
    pthread_cond_destroy(&engine->work);
    pthread_cond_destroy(&engine->done);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

// An engine with `helpers` threads beside the caller's; with fewer if the system grants no more.
engine_t *flyt_engine_open(int helpers, uint64_t spin_ns) {
    size_t size = sizeof(engine_t) + (size_t)helpers * sizeof(pthread_t);
    size = (size + LINE - 1) / LINE * LINE;
    engine_t *engine = aligned_alloc(LINE, size);
    if (!engine)
        return NULL;
    memset(engine, 0, size);
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

size_t flyt_engine_job_size(void) { return sizeof(ticket_t); }

// A free place, claimed: no pieces yet, and of an odd generation. NULL where none of those that were tried is free.
static place_t *claim(engine_t *engine) {
    for (int i = 0; i < PLACES; i++) {
        uint32_t number = atomic_fetch_add_explicit(&engine->next, 1, memory_order_relaxed);
        place_t *place = &engine->places[number % PLACES];
        uint64_t left = atomic_load_explicit(&place->left, memory_order_relaxed);
        // Acquire: the threads of the job before have read its fields.
        if (!(left >> 32 & 1) &&
            atomic_compare_exchange_strong_explicit(&place->left, &left, left + (UINT64_C(1) << 32),
                                                    memory_order_acquire, memory_order_relaxed))
            return place;
    }
    return NULL;
}

// Queue a copy between ranges that don't overlap, of less than 2^32 pieces. They stay until flyt_engine_wait returns,
// or flyt_engine_close; `ticket` is the caller's own. Returns 0 where there is no place: nothing is queued then.
int flyt_engine_post(engine_t *engine, ticket_t *ticket, char *dst, const char *src, size_t size, size_t piece,
                     int streams) {
    *ticket = (ticket_t){0};
    if (!size)
        return 1;
    place_t *place = claim(engine);
    if (!place)
        return 0;
    uint32_t generation = (uint32_t)(atomic_load_explicit(&place->left, memory_order_relaxed) >> 32);
    *ticket = (ticket_t){(uint32_t)(place - engine->places), generation};
    place->dst = dst, place->src = src, place->size = size, place->piece = piece, place->streams = streams;
    place->pieces = (uint32_t)((size + piece - 1) / piece);
    atomic_store_explicit(&place->unfinished, place->pieces, memory_order_relaxed);
    // Release: who fetches a piece finds the fields.
    atomic_store_explicit(&place->left, (uint64_t)generation << 32 | place->pieces, memory_order_release);
    atomic_fetch_add(&engine->posted, 1);
    wake_two(engine);
    return 1;
}

// Whether the job has its place still. Where it has not, the bytes are there (seq_cst is acquire too).
static int is_under_way(const place_t *place, const ticket_t *ticket) {
    return atomic_load(&place->left) >> 32 == ticket->generation;
}

// Help until the last byte of a copy is in place. At once if it was waited for already, or never posted (its ticket
// is zero then): an interrupt may have struck before or after.
void flyt_engine_wait(engine_t *engine, const ticket_t *ticket) {
    if (!ticket->generation)
        return;
    const place_t *place = &engine->places[ticket->place];
    uint64_t left;
    while ((left = atomic_load(&place->left)) >> 32 == ticket->generation && (uint32_t)left && help(engine, place))
        ;
    if (engine->spin_ns) // a piece's time, less than a sleep and a wake-up
        for (uint64_t end = now_ns() + engine->spin_ns; is_under_way(place, ticket) && now_ns() < end;)
            sched_yield();
    if (!is_under_way(place, ticket))
        return;
    pthread_mutex_lock(&engine->lock);
    atomic_fetch_add(&engine->waiting, 1);
    while (is_under_way(place, ticket))
        pthread_cond_wait(&engine->done, &engine->lock);
    atomic_fetch_sub(&engine->waiting, 1);
    pthread_mutex_unlock(&engine->lock);
}
