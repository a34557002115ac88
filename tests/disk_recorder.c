/* Recorder of what a process and its children do to the files below one folder, preloaded into them (LD_PRELOAD).
 *
 * PROFILING_AGENT_RECORD_ROOT names the folder, PROFILING_AGENT_RECORD_LOG another one, outside of it, which gets `events`
 * (a line each, fields divided by tabs, paths relative to the root, in the order in which they happened on the machine) and
 * `data` (bytes that the lines point into). power_loss.py reads both. What a library does past these functions, as through a
 * memory map or by system calls of its own, is seen where its file is synced or renamed, or its folder is.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))real(#name))
#define LINE (1 << 16)

static char root[PATH_MAX];
static size_t root_length;
static int events = -1, data = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static int out_of_the_way(const char *folder, const char *name) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int low = REAL(open)(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int high = fcntl(low, F_DUPFD_CLOEXEC, 600);
    close(low);
    return high;
}

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...) {
    char line[LINE];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    line[length++] = '\n';
    if (length >= (int)sizeof line || REAL(write)(events, line, length) != length) abort();
}

__attribute__((constructor)) static void begin(void) {
    const char *named = getenv("PROFILING_AGENT_RECORD_ROOT"), *log = getenv("PROFILING_AGENT_RECORD_LOG");
    if (events >= 0 || !named || !log || !realpath(named, root)) return;
    root_length = strlen(root);
    data = out_of_the_way(log, "data");
    events = out_of_the_way(log, "events");
    char command[1000] = "";
    int descriptor = REAL(open)("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t length = read(descriptor, command, sizeof command - 1);
    close(descriptor);
    for (ssize_t at = 0; at < length; at++)
        if (command[at] < ' ') command[at] = ' ';
    say("process\t%d\t%s", getpid(), command);
}

/* One at a time on the machine: what the log says first happened first. */
static void lock(void) {
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    pthread_mutex_lock(&mutex);
    while (fcntl(events, F_SETLKW, &whole) && errno == EINTR) continue;
}

static void unlock(void) {
    struct flock whole = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
    int kept = errno;
    fcntl(events, F_SETLK, &whole);
    pthread_mutex_unlock(&mutex);
    errno = kept;
}

/* The path below the root, "." for the root itself, NULL for any other. */
static const char *below(const char *path) {
    if (events < 0 || strncmp(path, root, root_length)) return NULL;
    return !path[root_length] ? "." : path[root_length] == '/' ? path + root_length + 1 : NULL;
}

static const char *of_descriptor(int descriptor, char *buffer) {
    char link[64];
    if (events < 0) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    if (length <= 0) return NULL;
    buffer[length] = 0;
    return strstr(buffer, " (deleted)") ? NULL : below(buffer);
}

/* A name that may not exist, its folder with all links followed. */
static const char *of_name(int folder, const char *name, char *buffer) {
    char whole[2 * PATH_MAX], parent[PATH_MAX];
    if (events < 0 || !name) return NULL;
    if (name[0] == '/' || folder == AT_FDCWD) snprintf(whole, sizeof whole, "%s", name);
    else snprintf(whole, sizeof whole, "/proc/self/fd/%d/%s", folder, name);
    size_t length = strlen(whole);
    while (length > 1 && whole[length - 1] == '/') whole[--length] = 0;
    char *slash = strrchr(whole, '/');
    const char *last = slash ? slash + 1 : whole;
    if (slash) *slash = 0;
    if (!realpath(slash ? (whole[0] ? whole : "/") : ".", parent)) return NULL;
    if (snprintf(buffer, PATH_MAX, "%s/%s", strcmp(parent, "/") ? parent : "", last) >= PATH_MAX) return NULL;
    return below(buffer);
}

static const char *at(const char *path, char *buffer) {
    snprintf(buffer, PATH_MAX, "%s/%s", root, path);
    return buffer;
}

static long long stored(const void *bytes, size_t length) {
    long long offset = lseek(data, 0, SEEK_END);
    for (size_t done = 0; done < length;) {
        ssize_t wrote = REAL(write)(data, (const char *)bytes + done, length - done);
        if (wrote < 0) abort();
        done += wrote;
    }
    return offset;
}

/* Say what a file holds now. */
static void hold(const char *verb, const char *path) {
    char buffer[PATH_MAX], *chunk = malloc(1 << 20);
    int descriptor = REAL(open)(at(path, buffer), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    long long offset = lseek(data, 0, SEEK_END), length = 0;
    for (ssize_t got; descriptor >= 0 && (got = read(descriptor, chunk, 1 << 20)) > 0; length += got) stored(chunk, got);
    if (descriptor >= 0) {
        close(descriptor);
        say("%s\t%s\t%lld\t%lld", verb, path, offset, length);
    }
    free(chunk);
}

/* Say all names in a folder, and what is below it too where that is asked; with `contents` what the files hold. */
static void tell(const char *path, int contents, int deep) {
    char buffer[PATH_MAX], name[PATH_MAX], target[PATH_MAX], *all = calloc(1, LINE);
    DIR *folder = opendir(at(path, buffer));
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") &&
            strlen(all) + strlen(entry->d_name) + 2 < LINE - PATH_MAX - 10)
            strcat(strcat(all, "\t"), entry->d_name);
    if (folder) say("names\t%s%s", path, all), rewinddir(folder);
    free(all);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (!strcmp(path, ".")) snprintf(name, sizeof name, "%s", entry->d_name);
        else if (snprintf(name, sizeof name, "%s/%s", path, entry->d_name) >= (int)sizeof name) continue;
        struct stat status;
        if (lstat(at(name, buffer), &status)) continue;
        if (S_ISDIR(status.st_mode)) {
            say("mkdir\t%s", name);
            if (deep) tell(name, contents, 1);
        } else if (S_ISLNK(status.st_mode)) {
            ssize_t length = readlink(buffer, target, sizeof target - 1);
            target[length < 0 ? 0 : length] = 0;
            say("symlink\t%s\t%s", name, target);
        } else if (S_ISREG(status.st_mode)) {
            if (contents) hold("seen", name);
            else say("create\t%s", name);
        }
    }
    if (folder) closedir(folder);
}

static int opened(int descriptor, int flags) {
    char buffer[PATH_MAX];
    const char *path;
    struct stat status;
    if (descriptor < 0 || !(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE) return descriptor;
    int kept = errno;
    if (!fstat(descriptor, &status) && S_ISREG(status.st_mode) && (path = of_descriptor(descriptor, buffer))) {
        lock();
        if (flags & O_CREAT) say("create\t%s", path);
        if (flags & O_TRUNC) say("truncate\t%s\t0", path);
        unlock();
    }
    errno = kept;
    return descriptor;
}

#define MODE(flags)                                      \
    mode_t mode = 0;                                     \
    if ((flags) & (O_CREAT | O_TMPFILE)) {               \
        va_list arguments;                               \
        va_start(arguments, flags);                      \
        mode = va_arg(arguments, mode_t);                \
        va_end(arguments);                               \
    }
int open(const char *name, int flags, ...) { MODE(flags) return opened(REAL(open)(name, flags, mode), flags); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(REAL(open64)(name, flags, mode), flags); }
int openat(int folder, const char *name, int flags, ...) {
    MODE(flags) return opened(REAL(openat)(folder, name, flags, mode), flags);
}
int openat64(int folder, const char *name, int flags, ...) {
    MODE(flags) return opened(REAL(openat64)(folder, name, flags, mode), flags);
}
int creat(const char *name, mode_t mode) { return opened(REAL(creat)(name, mode), O_CREAT | O_TRUNC); }
int creat64(const char *name, mode_t mode) { return opened(REAL(creat64)(name, mode), O_CREAT | O_TRUNC); }

static FILE *streaming(FILE *stream, const char *how) {
    if (stream && how[0] != 'r') opened(fileno(stream), O_CREAT | (how[0] == 'w' ? O_TRUNC : 0));
    return stream;
}
FILE *fopen(const char *name, const char *how) { return streaming(REAL(fopen)(name, how), how); }
FILE *fopen64(const char *name, const char *how) { return streaming(REAL(fopen64)(name, how), how); }

static void wrote(int descriptor, const void *bytes, ssize_t length, long long offset) {
    char buffer[PATH_MAX];
    struct stat status;
    int kept = errno;
    const char *path = length > 0 && events >= 0 && !fstat(descriptor, &status) && S_ISREG(status.st_mode)
                           ? of_descriptor(descriptor, buffer)
                           : NULL;
    if (path) {
        if (offset < 0) offset = lseek(descriptor, 0, SEEK_CUR) - length;
        say("write\t%s\t%lld\t%lld\t%zd", path, offset, stored(bytes, length), length);
    }
    errno = kept;
}

/* The lock is taken for regular files alone: whoever writes to a full pipe would keep everybody waiting. */
static int is_ours(int descriptor) {
    char buffer[PATH_MAX];
    struct stat status;
    int kept = errno;
    int found = events >= 0 && !fstat(descriptor, &status) && S_ISREG(status.st_mode) && of_descriptor(descriptor, buffer);
    errno = kept;
    return found;
}

#define WRITTEN(call, bytes, offset)                  \
    if (!is_ours(descriptor)) return call;            \
    lock();                                           \
    ssize_t length = call;                            \
    wrote(descriptor, bytes, length, offset);         \
    unlock();                                         \
    return length;
ssize_t write(int descriptor, const void *bytes, size_t num) { WRITTEN(REAL(write)(descriptor, bytes, num), bytes, -1) }
ssize_t pwrite(int descriptor, const void *bytes, size_t num, off_t offset) {
    WRITTEN(REAL(pwrite)(descriptor, bytes, num, offset), bytes, offset)
}
ssize_t pwrite64(int descriptor, const void *bytes, size_t num, off64_t offset) {
    WRITTEN(REAL(pwrite64)(descriptor, bytes, num, offset), bytes, offset)
}
ssize_t writev(int descriptor, const struct iovec *parts, int num) {
    if (!is_ours(descriptor)) return REAL(writev)(descriptor, parts, num);
    ssize_t total = 0;
    for (int part = 0; part < num; part++) {
        ssize_t length = write(descriptor, parts[part].iov_base, parts[part].iov_len);
        if (length < 0) return total ? total : length;
        total += length;
        if ((size_t)length < parts[part].iov_len) break;
    }
    return total;
}

#define DONE(call, path, ...)             \
    if (!(path)) return call;             \
    lock();                               \
    int result = call;                    \
    int error = errno;                    \
    if (!result) say(__VA_ARGS__);        \
    errno = error;                        \
    unlock();                             \
    return result;
int ftruncate(int descriptor, off_t size) {
    char buffer[PATH_MAX];
    const char *path = of_descriptor(descriptor, buffer);
    DONE(REAL(ftruncate)(descriptor, size), path, "truncate\t%s\t%lld", path, (long long)size)
}
int ftruncate64(int descriptor, off64_t size) {
    char buffer[PATH_MAX];
    const char *path = of_descriptor(descriptor, buffer);
    DONE(REAL(ftruncate64)(descriptor, size), path, "truncate\t%s\t%lld", path, (long long)size)
}
int mkdirat(int folder, const char *name, mode_t mode) {
    char buffer[PATH_MAX];
    const char *path = of_name(folder, name, buffer);
    DONE(REAL(mkdirat)(folder, name, mode), path, "mkdir\t%s", path)
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
int symlinkat(const char *target, int folder, const char *name) {
    char buffer[PATH_MAX];
    const char *path = of_name(folder, name, buffer);
    DONE(REAL(symlinkat)(target, folder, name), path, "symlink\t%s\t%s", path, target)
}
int symlink(const char *target, const char *name) { return symlinkat(target, AT_FDCWD, name); }
int linkat(int from, const char *old, int to, const char *name, int flags) {
    char first[PATH_MAX], second[PATH_MAX];
    const char *source = of_name(from, old, first), *path = source ? of_name(to, name, second) : NULL;
    DONE(REAL(linkat)(from, old, to, name, flags), path, "link\t%s\t%s", source, path)
}
int link(const char *old, const char *name) { return linkat(AT_FDCWD, old, AT_FDCWD, name, 0); }
int unlinkat(int folder, const char *name, int flags) {
    char buffer[PATH_MAX];
    const char *path = of_name(folder, name, buffer);
    DONE(REAL(unlinkat)(folder, name, flags), path, "remove\t%s", path)
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    struct stat status;
    return unlinkat(AT_FDCWD, name, !lstat(name, &status) && S_ISDIR(status.st_mode) ? AT_REMOVEDIR : 0);
}

int renameat2(int from, const char *old, int to, const char *name, unsigned flags) {
    char first[PATH_MAX], second[PATH_MAX], buffer[PATH_MAX];
    const char *source = of_name(from, old, first), *path = of_name(to, name, second);
    struct stat status;
    if (!source && !path) return REAL(renameat2)(from, old, to, name, flags);
    lock();
    if (source && !lstat(at(source, buffer), &status)) {
        if (S_ISDIR(status.st_mode)) tell(source, 1, 1);
        else if (S_ISREG(status.st_mode)) hold("seen", source);
    }
    int result = REAL(renameat2)(from, old, to, name, flags), error = errno;
    if (!result && source && path) say("rename\t%s\t%s", source, path);
    else if (!result && source) say("remove\t%s", source);
    else if (!result && !lstat(at(path, buffer), &status)) {
        if (S_ISREG(status.st_mode)) hold("seen", path);
        else if (S_ISDIR(status.st_mode)) say("mkdir\t%s", path), tell(path, 1, 1);
    }
    errno = error;
    unlock();
    return result;
}
int renameat(int from, const char *old, int to, const char *name) { return renameat2(from, old, to, name, 0); }
int rename(const char *old, const char *name) { return renameat2(AT_FDCWD, old, AT_FDCWD, name, 0); }

static int synced(int descriptor, int (*sync)(int)) {
    char buffer[PATH_MAX];
    struct stat status;
    const char *path = of_descriptor(descriptor, buffer);
    if (!path || fstat(descriptor, &status)) return sync(descriptor);
    lock();
    if (S_ISDIR(status.st_mode)) tell(path, 0, 0);
    else hold("seen", path);
    int result = sync(descriptor), error = errno;
    if (!result) say("sync\t%s", path);
    errno = error;
    unlock();
    return result;
}
int fsync(int descriptor) { return synced(descriptor, REAL(fsync)); }
int fdatasync(int descriptor) { return synced(descriptor, REAL(fdatasync)); }
