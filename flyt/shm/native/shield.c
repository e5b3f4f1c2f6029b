// SPDX-License-Identifier: Apache-2.0
// Blocks signals of the calling thread around a few lines of Python, nested: see flyt/frontend/shield.py.
//
// One call to enter and one to leave. Called with the GIL held, so `check` may be Python's own.

#include <signal.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    sigset_t shielded; // what is blocked
    sigset_t before;   // the thread's mask outside
    int depth;
    int (*check)(void); // runs the handlers of signals that came before; not 0: one of them raised
} shield_t;

size_t flyt_shield_size(void) { return sizeof(shield_t); }

void flyt_shield_init(shield_t *shield, const int *signals, int count, int (*check)(void)) {
    sigemptyset(&shield->shielded);
    for (int i = 0; i < count; i++)
        sigaddset(&shield->shielded, signals[i]);
    shield->depth = 0;
    shield->check = check;
}

// When a handler raises nothing is blocked: the exception is the caller's.
void flyt_shield_enter(shield_t *shield) {
    if (shield->depth == 0) {
        pthread_sigmask(SIG_BLOCK, &shield->shielded, &shield->before);
        if (shield->check()) {
            pthread_sigmask(SIG_SETMASK, &shield->before, NULL);
            return;
        }
    }
    shield->depth++;
}

// Safe to call once too often: an interrupt may have struck before `enter`.
void flyt_shield_leave(shield_t *shield) {
    if (shield->depth > 0 && --shield->depth == 0)
        pthread_sigmask(SIG_SETMASK, &shield->before, NULL);
}
