// SPDX-License-Identifier: Apache-2.0
// An upper half in C++: constructors, destructors, exceptions, and the ways to end.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>

#include "halves.h"

extern char **environ;

struct Lives {
    std::string name;
    explicit Lives(const char *n) : name(n) { std::cout << "constructed " << name << " " << one_add(1, 1) << "\n"; }
    ~Lives() { std::cout << "destructed " << name << " " << two_add(1, 2) << "\n"; }
};
static Lives global("global");
static thread_local Lives local("local");
static void at_end() { printf("atexit\n"); }

int main(int argc, char **argv) {
    std::string how = argc > 1 ? argv[1] : "return";
    long bytes = 0;
    for (char **v = environ; *v; v++)
        bytes += (long)strlen(*v);
    printf("argc %d argv0 %s environment %ld\n", argc, argv[0], bytes);
    for (int i = 2; i < argc; i++)
        printf("argument %s\n", argv[i]);
    atexit(at_end);
    std::cout << local.name << "\n";
    try {
        throw std::runtime_error("caught");
    } catch (const std::exception &e) {
        printf("%s\n", e.what());
    }
    one_print("lower one's line\n");
    two_print("lower two's line\n");
    printf("upper's line\n");
    if (how == "exit")
        exit(12);
    if (how == "_exit")
        _exit(13);
    if (how == "abort")
        abort();
    if (how == "lower")
        one_leave(14);
    if (how == "thread")
        std::thread([] { exit(15); }).join();
    return 11;
}
