/* Preloaded into the program under test: kills it with SIGKILL at the N-th call that changes the file system, N from
 * FERROTRON_TEST_CRASH_AT (0: never). A write is torn: half of it is done. The number of such calls goes to the file
 * FERROTRON_TEST_CRASH_COUNT when the program ends by itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;
static long crash_at;

static void end_now(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* True if this is the call at which to end. */
static int due(void) { return atomic_fetch_add(&calls, 1) + 1 == crash_at; }
static void point(void) { if (due()) end_now(); }

__attribute__((constructor)) static void begin(void) {
    const char *at = getenv("FERROTRON_TEST_CRASH_AT");
    crash_at = at ? atol(at) : 0;
}

__attribute__((destructor)) static void end(void) {
    const char *path = getenv("FERROTRON_TEST_CRASH_COUNT");
    char text[32];
    if (!path) return;
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    int n = snprintf(text, sizeof text, "%ld", atomic_load(&calls));
    if (fd >= 0 && syscall(SYS_write, fd, text, n) == n) syscall(SYS_close, fd);
}

static int regular(int fd) {
    struct stat s;
    return fstat(fd, &s) == 0 && S_ISREG(s.st_mode);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name, first, pass)                                      \
    int name(first const char *path, int flags, ...) {               \
        mode_t mode = 0;                                             \
        if (flags & (O_CREAT | __O_TMPFILE)) {                       \
            va_list more;                                            \
            va_start(more, flags);                                   \
            mode = va_arg(more, int);                                \
            va_end(more);                                            \
        }                                                            \
        if (flags & (O_CREAT | O_TRUNC)) point();                    \
        return ((int (*)(first const char *, int, ...))dlsym(RTLD_NEXT, #name))(pass path, flags, mode); \
    }
#define AT int dir,
#define DIR dir,
#define NONE
OPEN(open, NONE, NONE)
OPEN(open64, NONE, NONE)
OPEN(openat, AT, DIR)
OPEN(openat64, AT, DIR)

ssize_t write(int fd, const void *bytes, size_t n) {
    if (regular(fd) && due()) {
        NEXT(write)(fd, bytes, n / 2);
        end_now();
    }
    return NEXT(write)(fd, bytes, n);
}
ssize_t writev(int fd, const struct iovec *v, int n) {
    if (regular(fd)) point();
    return NEXT(writev)(fd, v, n);
}
ssize_t pwrite64(int fd, const void *bytes, size_t n, off64_t at) {
    if (due()) {
        NEXT(pwrite64)(fd, bytes, n / 2, at);
        end_now();
    }
    return NEXT(pwrite64)(fd, bytes, n, at);
}
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t n, unsigned flags) {
    point();
    return NEXT(copy_file_range)(from, a, to, b, n, flags);
}
int rename(const char *from, const char *to) { point(); return NEXT(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) { point(); return NEXT(renameat)(a, from, b, to); }
int unlink(const char *path) { point(); return NEXT(unlink)(path); }
int unlinkat(int dir, const char *path, int flags) { point(); return NEXT(unlinkat)(dir, path, flags); }
int mkdir(const char *path, mode_t mode) { point(); return NEXT(mkdir)(path, mode); }
int rmdir(const char *path) { point(); return NEXT(rmdir)(path); }
int fsync(int fd) { point(); return NEXT(fsync)(fd); }
int fdatasync(int fd) { point(); return NEXT(fdatasync)(fd); }
int ftruncate64(int fd, off64_t n) { point(); return NEXT(ftruncate64)(fd, n); }
