/*
 * Fast clocks for QEMU inside the lab (LD_PRELOAD).
 *
 * User-Mode Linux has no vDSO clock: every clock_gettime() is a full system
 * call of some microseconds, and QEMU makes about 18 of them for each byte it
 * reads from its monitor. This answers from the TSC instead and asks the
 * kernel only about ten times a second, which takes a domain's start from
 * half a minute to seconds.
 *
 * One parameter set is current at any time; readers pick it up without a lock.
 * A new set continues exactly where the old one stands and corrects any error
 * by running a little faster or slower, so a clock never steps back.
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

#define SECOND 1000000000LL
#define REFRESH (SECOND / 10) /* how long a parameter set is used */
#define SETS 64               /* a reader would have to sleep 6 s to lose one */

struct set {
	uint64_t tsc;     /* at this TSC value ... */
	int64_t mono;     /* ... the monotonic clock answers this, in ns */
	uint64_t until;   /* TSC value from which a new set is due */
	uint64_t rate;    /* ns per TSC tick, 32.32 fixed point */
	int64_t real;     /* realtime minus monotonic */
};

static struct set sets[SETS];
static _Atomic unsigned current;
static atomic_flag refreshing = ATOMIC_FLAG_INIT;
static uint64_t first_tsc;
static int64_t first_mono;
static int64_t boot, raw, tai; /* minus monotonic; constant inside the lab */

static int64_t ask(clockid_t id)
{
	struct timespec t;

	syscall(SYS_clock_gettime, id, &t);
	return t.tv_sec * SECOND + t.tv_nsec;
}

/*
 * Clock ID read against the monotonic clock: the best of three tries, as being
 * scheduled away between two reads would look like a step of the clock.
 */
static int64_t offset(clockid_t id)
{
	int64_t best = 0, width = INT64_MAX;

	for (int i = 0; i < 3; i++) {
		int64_t before = ask(CLOCK_MONOTONIC);
		int64_t there = ask(id);
		int64_t after = ask(CLOCK_MONOTONIC);

		if (after - before < width) {
			width = after - before;
			best = there - before - width / 2;
		}
	}
	return best;
}

static int64_t monotonic(const struct set *s, uint64_t tsc)
{
	/* A reader that was delayed may hold an older TSC than the set. */
	if (tsc < s->tsc)
		return s->mono;
	return s->mono + (int64_t)(((unsigned __int128)(tsc - s->tsc) * s->rate) >> 32);
}

/* Read the kernel's clocks and publish the next set. One thread at a time. */
static void refresh(void)
{
	unsigned now = atomic_load(&current);
	struct set *old = &sets[now % SETS], *new = &sets[(now + 1) % SETS];
	uint64_t before = __rdtsc();
	int64_t truth = ask(CLOCK_MONOTONIC);
	uint64_t after = __rdtsc();
	uint64_t tsc = before + (after - before) / 2;
	double rate = (double)(truth - first_mono) / (double)(tsc - first_tsc);
	int64_t shown = monotonic(old, tsc), error = truth - shown;

	new->tsc = tsc;
	/* Behind: catch up at once. Ahead: keep still or slow down. */
	new->mono = error > 0 ? truth : shown;
	if (error < 0)
		rate *= -error >= REFRESH / 2 ? 0.5 : 1.0 + (double)error / REFRESH;
	new->rate = (uint64_t)(rate * 4294967296.0);
	new->until = tsc + (uint64_t)(REFRESH / rate);
	new->real = offset(CLOCK_REALTIME);
	atomic_store(&current, now + 1);
}

__attribute__((constructor)) static void calibrate(void)
{
	struct set *s = &sets[0];

	/* For the emulator alone, not for what it may start. */
	unsetenv("LD_PRELOAD");
	first_mono = ask(CLOCK_MONOTONIC);
	first_tsc = __rdtsc();
	while (ask(CLOCK_MONOTONIC) - first_mono < SECOND / 200)
		;
	s->tsc = first_tsc;
	s->mono = first_mono;
	s->rate = (uint64_t)1 << 29; /* slow; replaced before anyone sees it */
	boot = offset(CLOCK_BOOTTIME);
	raw = offset(CLOCK_MONOTONIC_RAW);
	tai = offset(CLOCK_TAI);
	refresh();
}

static int64_t now_monotonic(const struct set **set)
{
	uint64_t tsc = __rdtsc();
	const struct set *s = &sets[atomic_load(&current) % SETS];

	if (tsc > s->until && !atomic_flag_test_and_set(&refreshing)) {
		refresh();
		atomic_flag_clear(&refreshing);
		s = &sets[atomic_load(&current) % SETS];
		tsc = __rdtsc();
	}
	*set = s;
	return monotonic(s, tsc);
}

int clock_gettime(clockid_t id, struct timespec *t)
{
	const struct set *s;
	int64_t ns;

	switch (id) {
	case CLOCK_MONOTONIC:
	case CLOCK_MONOTONIC_COARSE:
		ns = now_monotonic(&s);
		break;
	case CLOCK_REALTIME:
	case CLOCK_REALTIME_COARSE:
		ns = now_monotonic(&s) + s->real;
		break;
	case CLOCK_BOOTTIME:
		ns = now_monotonic(&s) + boot;
		break;
	case CLOCK_MONOTONIC_RAW:
		ns = now_monotonic(&s) + raw;
		break;
	case CLOCK_TAI:
		ns = now_monotonic(&s) + tai;
		break;
	default: /* CPU time and the unknown: the kernel's to answer */
		return (int)syscall(SYS_clock_gettime, id, t);
	}
	t->tv_sec = ns / SECOND;
	t->tv_nsec = ns % SECOND;
	return 0;
}

int gettimeofday(struct timeval *restrict tv, void *restrict tz)
{
	struct timespec t;

	if (tz)
		return (int)syscall(SYS_gettimeofday, tv, tz);
	clock_gettime(CLOCK_REALTIME, &t);
	tv->tv_sec = t.tv_sec;
	tv->tv_usec = t.tv_nsec / 1000;
	return 0;
}

time_t time(time_t *out)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	if (out)
		*out = t.tv_sec;
	return t.tv_sec;
}
