/* Steps the wall clock of one process: adds what stands in the file that CLOCKSHIM names (nanoseconds; the first word
   for CLOCK_REALTIME, the second for CLOCK_BOOTTIME, as after a suspend). Mapped, so that it can be stepped at any time.
   Only this process and what it forks: what it executes has true time, unless CLOCKSHIM_DEEP is set. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *offsets;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("CLOCKSHIM");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = fd < 0 ? MAP_FAILED : mmap(NULL, 2 * sizeof *offsets, PROT_READ, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        abort();
    close(fd);
    offsets = page;
    if (!getenv("CLOCKSHIM_DEEP"))
        unsetenv("LD_PRELOAD");
}

int clock_gettime(clockid_t id, struct timespec *ts)
{
    int failed = (int)syscall(SYS_clock_gettime, id, ts);
    if (!failed && offsets && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_BOOTTIME)) {
        long long ns = ts->tv_nsec + offsets[id == CLOCK_BOOTTIME] % 1000000000;
        ts->tv_sec += offsets[id == CLOCK_BOOTTIME] / 1000000000 + (ns < 0 ? -1 : ns / 1000000000);
        ts->tv_nsec = ns < 0 ? ns + 1000000000 : ns % 1000000000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone)
{
    struct timespec ts;
    (void)zone;
    int failed = clock_gettime(CLOCK_REALTIME, &ts);
    tv->tv_sec = ts.tv_sec;
    tv->tv_usec = ts.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *out)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    if (out)
        *out = ts.tv_sec;
    return ts.tv_sec;
}
