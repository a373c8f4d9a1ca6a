/* Faults of the file system, for LD_PRELOAD on Linux: the nth call of a kind, on a file below one
 * folder, fails or finds the file changed. fault_root and fault_arm are called from Python
 * by ctypes; without them every call goes to the C library. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum operation { OPEN, STAT, READ, WRITE, FSYNC, RENAME, LIST, CHMOD, OPERATIONS };
/* Below zero; above zero it is an errno. */
enum change { SHORT = -1, VANISH = -2, CUT = -3, OTHER = -4, EVERY_SHORT = -5 };

#define FILES 4096
static char root[PATH_MAX], paths[FILES][512];
static char struck[512];
static int calls[OPERATIONS], armed = -1, nth, kind;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void fault_root(const char *folder) { snprintf(root, sizeof root, "%s", folder); }
int fault_calls(int operation) { return calls[operation]; }
const char *fault_struck(void) { return struck; }
void fault_arm(int operation, int number, int what) {
    memset(calls, 0, sizeof calls);
    armed = operation, nth = number, kind = what, struck[0] = 0;
}

static int within(const char *path) {
    return root[0] && path && (path[0] != '/' || !strncmp(path, root, strlen(root)));
}

/* The file as another process would leave it. */
static void change(const char *path) {
    struct stat status;
    if (kind == VANISH) {
        REAL(unlink)(path);
    } else if (!REAL(stat)(path, &status) && S_ISREG(status.st_mode)) {
        int file = REAL(open64)(path, O_WRONLY);
        if (kind == CUT) {
            if (ftruncate(file, status.st_size / 2)) errno = 0;
        } else if (REAL(write)(file, "{\"other\": 1}", 12) < 0) {
            errno = 0;
        }
        REAL(close)(file);
    }
}

/* 1: the call fails with errno; 2: it is short; 0: it goes on. */
static int strikes(int operation, const char *path) {
    if (!within(path)) return 0;
    calls[operation]++;
    if (operation != armed) return 0;
    if (kind != EVERY_SHORT && calls[operation] != nth) return 0;
    snprintf(struck, sizeof struck, "%s", path);
    if (kind == EVERY_SHORT) return 2;
    if (kind > 0) return errno = kind, 1;
    if (kind == SHORT) return 2;
    change(path);
    return 0;
}

static const char *path_of(int file) { return file >= 0 && file < FILES ? paths[file] : ""; }
static int at(int file) { return path_of(file)[0] != 0; }
static int opened(int file, const char *path) {
    if (file >= 0 && file < FILES) {
        if (within(path)) snprintf(paths[file], sizeof paths[file], "%s", path);
        else paths[file][0] = 0;
    }
    return file;
}

#define MODE(flags, mode) \
    int mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, int); va_end(rest); }

int open64(const char *path, int flags, ...) {
    MODE(flags, mode)
    return strikes(OPEN, path) == 1 ? -1 : opened(REAL(open64)(path, flags, mode), path);
}
int open(const char *path, int flags, ...) {
    MODE(flags, mode)
    return strikes(OPEN, path) == 1 ? -1 : opened(REAL(open)(path, flags, mode), path);
}
int close(int file) {
    if (file >= 0 && file < FILES) paths[file][0] = 0;
    return REAL(close)(file);
}
int stat64(const char *path, struct stat64 *status) {
    return strikes(STAT, path) == 1 ? -1 : REAL(stat64)(path, status);
}
int lstat64(const char *path, struct stat64 *status) {
    return strikes(STAT, path) == 1 ? -1 : REAL(lstat64)(path, status);
}
int stat(const char *path, struct stat *status) {
    return strikes(STAT, path) == 1 ? -1 : REAL(stat)(path, status);
}
int lstat(const char *path, struct stat *status) {
    return strikes(STAT, path) == 1 ? -1 : REAL(lstat)(path, status);
}
ssize_t read(int file, void *bytes, size_t count) {
    int fault = at(file) ? strikes(READ, path_of(file)) : 0;
    return fault == 1 ? -1 : REAL(read)(file, bytes, fault == 2 && count ? 1 : count);
}
ssize_t pread64(int file, void *bytes, size_t count, off64_t start) {
    int fault = at(file) ? strikes(READ, path_of(file)) : 0;
    return fault == 1 ? -1 : REAL(pread64)(file, bytes, fault == 2 && count ? 1 : count, start);
}
ssize_t write(int file, const void *bytes, size_t count) {
    int fault = at(file) ? strikes(WRITE, path_of(file)) : 0;
    return fault == 1 ? -1 : REAL(write)(file, bytes, fault == 2 && count ? 1 : count);
}
int fsync(int file) { return at(file) && strikes(FSYNC, path_of(file)) == 1 ? -1 : REAL(fsync)(file); }
int rename(const char *from, const char *to) {
    return strikes(RENAME, to) == 1 ? -1 : REAL(rename)(from, to);
}
int link(const char *from, const char *to) {
    return strikes(RENAME, to) == 1 ? -1 : REAL(link)(from, to);
}
int chmod(const char *path, mode_t mode) {
    return strikes(CHMOD, path) == 1 ? -1 : REAL(chmod)(path, mode);
}
DIR *opendir(const char *path) { return strikes(LIST, path) == 1 ? NULL : REAL(opendir)(path); }
