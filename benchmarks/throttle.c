/* A disk of so many bytes per second for one directory of one process: write() and its kin wait for their turn there.
 *
 * Loaded with LD_PRELOAD, it sees every library that calls the C library: Python, C++ streams, Rust. There is one disk: a clock
 * that each 64 KiB moves on by what they take, whichever call writes them, so that small writes find their place among large ones. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SLICE 65536
#define SLACK 0.005 /* seconds that a writer may wake up late without losing what the disk could have done meanwhile */
#define NEXT(type, name, ...) \
    static type (*next)(__VA_ARGS__); \
    if (!next) next = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double free_at;
static uint64_t total;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + t.tv_nsec * 1e-9;
}

static void wait_until(double moment) {
    struct timespec t = {(time_t)moment, (long)((moment - (time_t)moment) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL)) {}
}

static int throttled(int descriptor) {
    static const char *directory;
    char link[64], path[PATH_MAX];
    if (!directory) directory = getenv("THROTTLE_DIRECTORY") ? getenv("THROTTLE_DIRECTORY") : "";
    size_t length = strlen(directory);
    if (!length) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t got = readlink(link, path, sizeof path);
    return got > (ssize_t)length && !strncmp(path, directory, length) && path[length] == '/';
}

static ssize_t pay(int descriptor, ssize_t bytes) {
    static double rate;
    if (bytes <= 0 || !throttled(descriptor)) return bytes;
    if (rate == 0) rate = atof(getenv("THROTTLE_BYTES_PER_SECOND"));
    for (ssize_t rest = bytes; rest > 0; rest -= SLICE) {
        ssize_t slice = rest < SLICE ? rest : SLICE;
        pthread_mutex_lock(&lock);
        double moment = now();
        if (free_at < moment - SLACK) free_at = moment - SLACK;
        free_at += slice / rate;
        moment = free_at;
        total += slice;
        pthread_mutex_unlock(&lock);
        wait_until(moment);
    }
    return bytes;
}

/* For the benchmark: bytes that were paid for so far. */
uint64_t throttle_bytes(void) { return total; }

ssize_t write(int fd, const void *data, size_t size) {
    NEXT(ssize_t, "write", int, const void *, size_t);
    return pay(fd, next(fd, data, size));
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    NEXT(ssize_t, "pwrite", int, const void *, size_t, off_t);
    return pay(fd, next(fd, data, size, offset));
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    NEXT(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    return pay(fd, next(fd, data, size, offset));
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    NEXT(ssize_t, "writev", int, const struct iovec *, int);
    return pay(fd, next(fd, parts, count));
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    NEXT(ssize_t, "pwritev", int, const struct iovec *, int, off_t);
    return pay(fd, next(fd, parts, count, offset));
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    NEXT(ssize_t, "pwritev64", int, const struct iovec *, int, off64_t);
    return pay(fd, next(fd, parts, count, offset));
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
    NEXT(ssize_t, "sendfile64", int, int, off64_t *, size_t);
    return pay(out, next(out, in, offset, size));
}

ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
    NEXT(ssize_t, "sendfile", int, int, off_t *, size_t);
    return pay(out, next(out, in, offset, size));
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    NEXT(ssize_t, "copy_file_range", int, off64_t *, int, off64_t *, size_t, unsigned);
    return pay(out, next(in, from, out, to, size, flags));
}
