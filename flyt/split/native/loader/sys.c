/* SPDX-License-Identifier: Apache-2.0 */
/* What the loader has instead of a C library: strings, messages, /proc/self/maps, CRC-32. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/syscall.h>

#include "loader.h"

void *memcpy(void *to, const void *from, size_t size) {
    void *result = to;
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
    return result;
}

void *memset(void *to, int byte, size_t size) {
    void *result = to;
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(size) : "a"(byte) : "memory");
    return result;
}

size_t strlen(const char *text) {
    size_t length = 0;
    while (text[length])
        length++;
    return length;
}

int strcmp(const char *a, const char *b) {
    while (*a && *a == *b)
        a++, b++;
    return (unsigned char)*a - (unsigned char)*b;
}

int same_start(const char *text, const char *start) {
    while (*start)
        if (*text++ != *start++)
            return 0;
    return 1;
}

/* The kernel looks at the set, then at the unknown `how`; where there is no set, it only writes the old one. */
int is_readable(const void *at) { return sys4(SYS_rt_sigprocmask, ~0, at, 0, 8) != -EFAULT; }
int is_writable(void *at) { return sys4(SYS_rt_sigprocmask, 0, 0, at, 8) != -EFAULT; }

static const char *number(uint64_t value, unsigned base, char room[24]) {
    char *at = room + 23;
    *at = 0;
    do
        *--at = "0123456789abcdef"[value % base];
    while (value /= base);
    return at;
}

const char *decimal(uint64_t value, char room[24]) { return number(value, 10, room); }
const char *hexadecimal(uint64_t value, char room[24]) { return number(value, 16, room); }

static void write_words(const char *first, va_list words) {
    char line[1024];
    size_t length = 0;
    const char *word = "flyt split: ";
    for (const char *next = first; word; next = va_arg(words, const char *)) {
        while (*word && length < sizeof line - 1)
            line[length++] = *word++;
        word = next;
    }
    line[length++] = '\n';
    sys3(SYS_write, 2, line, length);
}

void say(const char *first, ...) {
    va_list words;
    va_start(words, first);
    write_words(first, words);
    va_end(words);
}

void fail(int code, const char *first, ...) {
    va_list words;
    va_start(words, first);
    write_words(first, words);
    va_end(words);
    for (;;)
        sys1(SYS_exit_group, code);
}

static uint64_t hex_at(const char **at) {
    uint64_t value = 0;
    for (;; (*at)++) {
        char c = **at;
        if (c >= '0' && c <= '9')
            value = value * 16 + (uint64_t)(c - '0');
        else if (c >= 'a' && c <= 'f')
            value = value * 16 + (uint64_t)(c - 'a' + 10);
        else
            return value;
    }
}

static void parse_mapping(const char *line, struct mapping *to) {
    to->start = hex_at(&line), line++;
    to->end = hex_at(&line), line++;
    to->readable = line[0] == 'r', to->writable = line[1] == 'w';
    to->executable = line[2] == 'x', to->shared = line[3] == 's';
    line += 5;
    to->offset = hex_at(&line);
    for (int spaces = 0; spaces < 3 && *line; line++)
        spaces += *line == ' ';
    while (*line == ' ')
        line++;
    size_t length = strlen(line);
    if (length > sizeof to->name - 1)
        length = sizeof to->name - 1;
    memcpy(to->name, line, length);
    to->name[length] = 0;
}

int each_mapping(int (*visit)(void *data, const struct mapping *mapping), void *data) {
    char buffer[2048], line[512];
    size_t length = 0;
    struct mapping mapping;
    int result = 0;
    long fd = sys4(SYS_openat, AT_FDCWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC, 0);
    if (FAILED(fd))
        return -1;
    for (long got; !result && (got = sys3(SYS_read, fd, buffer, sizeof buffer)) > 0;)
        for (long i = 0; i < got && !result; i++) {
            if (buffer[i] != '\n') {
                if (length < sizeof line - 1)
                    line[length++] = buffer[i];
                continue;
            }
            line[length] = 0;
            length = 0;
            parse_mapping(line, &mapping);
            result = visit(data, &mapping);
        }
    sys1(SYS_close, fd);
    return result;
}

uint32_t crc32(uint32_t before, const void *bytes, uint64_t size) {
    static uint32_t table[8][256]; /* slicing by eight; the polynomial of zlib's crc32 */
    if (!table[0][1])
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t value = i;
            for (int bit = 0; bit < 8; bit++)
                value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0);
            table[0][i] = value;
        }
    if (!table[1][1])
        for (int row = 1; row < 8; row++)
            for (int i = 0; i < 256; i++)
                table[row][i] = table[row - 1][i] >> 8 ^ table[0][table[row - 1][i] & 255];
    const uint8_t *at = bytes;
    uint32_t crc = ~before;
    for (; size >= 8; size -= 8, at += 8) {
        uint64_t word;
        __builtin_memcpy(&word, at, 8);
        word ^= crc;
        crc = table[7][word & 255] ^ table[6][word >> 8 & 255] ^ table[5][word >> 16 & 255] ^
              table[4][word >> 24 & 255] ^ table[3][word >> 32 & 255] ^ table[2][word >> 40 & 255] ^
              table[1][word >> 48 & 255] ^ table[0][word >> 56];
    }
    while (size--)
        crc = crc >> 8 ^ table[0][(crc ^ *at++) & 255];
    return ~crc;
}
