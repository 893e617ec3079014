/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One registry of adopted ranges for the process. Several copies of libkvd may be in one
 * process (an engine's wheel and its router's, one linked, one opened with RTLD_LOCAL),
 * and none may adopt a range of another. Symbols are not shared across such copies, but
 * descriptors are. So the registry is a memfd, found by its name in /proc/self/fd, which
 * each copy maps: a lock and a table. The fds in it are numbers of this process, valid
 * for every copy. (Rejected: a weak symbol, which RTLD_LOCAL and version scripts hide;
 * reading everything back from /proc/self/maps, which gives no fd without
 * CAP_CHECKPOINT_RESTORE.)
 *
 * Two copies may search for it at once. They are serialised by the dynamic linker's lock,
 * held while dl_iterate_phdr() runs its callback: the only lock that all copies share
 * before they know each other. A child of fork() inherits the memfd, but not its memory
 * (MADV_DONTFORK): the name contains the process's id and its start time, so it does not
 * match in the child. The child gets private views of the adopted ranges
 * (client_adopt_fork.c).
 *
 * Entries live as long as their memory. The library is not notified when the engine frees
 * an adopted chunk and unmaps it. Ranges missing from the process's map are therefore
 * dropped, and their memfd is closed, at the next lock. A region of them has its own
 * descriptor.
 */
#include "lib/client_adopt.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "lib/client.h"

#define REGISTRY_MAGIC UINT64_C(0x3374706f64612d4b) /* "K-adopt3" */

struct adopt_registry {
	_Atomic uint64_t magic; /* written last by its creator */
	uint64_t bytes;		/* size of this struct: another size is incompatible */
	pthread_mutex_t lock;
	uint32_t count; /* entries below it may be in use */
	struct adopt_range ranges[ADOPT_RANGES_MAX];
};

/* This copy's mapping, and its process: a child's is not its parent's. Written under
 * the linker's lock. */
static struct adopt_registry *_Atomic mapped;
static _Atomic pid_t mapped_by;

/* ---- finding or making it ------------------------------------------------- */

/* Start time of this process, in ticks: field 22 of stat, after the name, which may
 * contain blanks and brackets. */
static uint64_t start_ticks(void)
{
	cleanup_close int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
	char text[1024], *at;
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);

	if (n <= 0)
		return 0;
	text[n] = '\0';
	at = strrchr(text, ')');
	for (int field = 2; at && field < 22; field++) {
		at = strchr(at + 1, ' ');
	}
	return at ? strtoull(at, NULL, 10) : 0;
}

static bool link_is(int dir_fd, const char *fd_name, const char *wanted)
{
	char target[128];
	ssize_t n = readlinkat(dir_fd, fd_name, target, sizeof(target) - 1);

	if (n <= 0)
		return false;
	target[n] = '\0';
	return strcmp(target, wanted) == 0;
}

/* The fd of any copy; -1: none. */
static int registry_search(const char *name)
{
	char wanted[128];
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *entry;
	int fd = -1;

	snprintf(wanted, sizeof(wanted), "/memfd:%s (deleted)", name);
	while (dir && fd < 0 && (entry = readdir(dir)))
		if (link_is(dirfd(dir), entry->d_name, wanted))
			fd = atoi(entry->d_name);
	if (dir)
		closedir(dir);
	return fd;
}

/* The fd stays open for the life of the process: other copies search for it. */
static struct adopt_registry *registry_map(int fd)
{
	struct adopt_registry *registry =
		mmap(NULL, sizeof(*registry), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (registry == MAP_FAILED)
		return NULL;
	(void)madvise(registry, sizeof(*registry), MADV_DONTFORK);
	return registry;
}

static struct adopt_registry *registry_make(const char *name)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	struct adopt_registry *registry = NULL;
	pthread_mutexattr_t attr;

	if (fd >= 0 && ftruncate(fd, sizeof(*registry)) == 0)
		registry = registry_map(fd);
	if (!registry) {
		int no = errno;

		mem_closep(&fd);
		errno = no;
		return NULL;
	}
	(void)fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
	pthread_mutexattr_init(&attr);
	pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(&registry->lock, &attr);
	pthread_mutexattr_destroy(&attr);
	registry->bytes = sizeof(*registry);
	atomic_store(&registry->magic, REGISTRY_MAGIC);
	return registry;
}

struct opening {
	bool make; /* if there is none */
	const char *why;
};

/* Runs under the linker's lock. */
static int registry_open(struct dl_phdr_info *info, size_t size, void *arg)
{
	struct adopt_registry *registry = NULL;
	struct opening *opening = arg;
	char name[64];
	int fd;

	(void)info;
	(void)size;
	if (atomic_load(&mapped) && atomic_load(&mapped_by) == getpid())
		return 1;
	snprintf(name, sizeof(name), "kvd-adopt-registry-%d-%" PRIu64, (int)getpid(),
		 start_ticks());
	fd = registry_search(name);
	if (fd < 0 && !opening->make)
		return 1;
	registry = fd >= 0 ? registry_map(fd) : registry_make(name);
	if (!registry) {
		opening->why = strerror(errno);
	} else if (atomic_load(&registry->magic) != REGISTRY_MAGIC ||
		   registry->bytes != sizeof(*registry)) {
		opening->why =
			"another version of libkvd in this process uses another format";
		munmap(registry, sizeof(*registry));
	} else {
		atomic_store(&mapped_by, getpid());
		atomic_store(&mapped, registry);
	}
	return 1;
}

static struct adopt_registry *registry_get(bool make)
{
	struct opening opening = {.make = make};

	if (!atomic_load(&mapped) || atomic_load(&mapped_by) != getpid())
		dl_iterate_phdr(registry_open, &opening);
	if (opening.why)
		client_error_set(client_error_thread(), KVD_E_IO,
				 "the registry of adopted memory: %s", opening.why);
	return atomic_load(&mapped_by) == getpid() ? atomic_load(&mapped) : NULL;
}

/* ---- entries --------------------------------------------------------------- */

struct mapped_bytes {
	const struct adopt_range *range;
	uint64_t at; /* mapped up to here, without a gap */
};

static int count_mapped(void *arg, const struct maps_area *area)
{
	struct mapped_bytes *m = arg;
	const struct adopt_range *r = m->range;

	if (!area->shared || area->inode != r->inode || area->begin > m->at ||
	    area->offset + (m->at - area->begin) != r->file_begin + (m->at - r->begin))
		return 1;
	m->at = area->end;
	return 0;
}

/* Is the moved memory still mapped at its address? */
static bool range_mapped(const struct adopt_range *range)
{
	struct mapped_bytes m = {range, range->begin};

	if (range->done == 0)
		return false;
	if (maps_each(range->begin, range->begin + range->done, count_mapped, &m) < 0)
		return true; /* the map is unknown: drop nothing */
	return m.at >= range->begin + range->done;
}

static void range_forget(struct adopt_range *range)
{
	struct stat st;

	/* after a foreign close() the number may refer to another file */
	if (fstat(range->fd, &st) == 0 && st.st_ino == range->inode &&
	    st.st_dev == range->device)
		close(range->fd);
	*range = (struct adopt_range){.fd = -1};
}

void adopt_registry_settle(struct adopt_registry *registry)
{
	for (uint32_t i = 0; i < registry->count; i++) {
		struct adopt_range *range = &registry->ranges[i];

		if (range->used && !range_mapped(range))
			range_forget(range);
	}
}

struct adopt_registry *adopt_registry_lock(bool make)
{
	struct adopt_registry *registry = registry_get(make);

	if (!registry)
		return NULL;
	if (pthread_mutex_lock(&registry->lock) == EOWNERDEAD)
		pthread_mutex_consistent(&registry->lock);
	adopt_registry_settle(registry);
	return registry;
}

void adopt_registry_unlock(struct adopt_registry *registry)
{
	pthread_mutex_unlock(&registry->lock);
}

struct adopt_range *adopt_registry_find(struct adopt_registry *registry, uint64_t begin,
					uint64_t end)
{
	for (uint32_t i = 0; i < registry->count; i++) {
		struct adopt_range *r = &registry->ranges[i];

		if (r->used && r->done > 0 && begin < r->begin + r->bytes &&
		    end > r->begin)
			return r;
	}
	return NULL;
}

struct adopt_range *adopt_registry_add(struct adopt_registry *registry, int fd,
				       uint64_t begin, uint64_t bytes,
				       uint64_t file_begin)
{
	struct stat st;
	uint32_t i = 0;

	while (i < registry->count && registry->ranges[i].used)
		i++;
	if (i == ADOPT_RANGES_MAX || fstat(fd, &st) < 0) {
		client_error_set(client_error_thread(), KVD_E_LIMIT,
				 "adopted ranges: limit of %u per process reached", i);
		return NULL;
	}
	registry->ranges[i] = (struct adopt_range){.begin = begin,
						   .bytes = bytes,
						   .file_begin = file_begin,
						   .inode = st.st_ino,
						   .device = st.st_dev,
						   .fd = fd,
						   .used = 1};
	if (i == registry->count)
		registry->count++;
	return &registry->ranges[i];
}

struct adopt_range *adopt_registry_note(uint32_t *count_p)
{
	struct adopt_registry *registry = NULL;
	struct adopt_range *ranges;
	uint32_t n = 0;

	*count_p = 0;
	if (atomic_load(&mapped_by) == getpid())
		registry = atomic_load(&mapped);
	if (!registry)
		return NULL;
	if (pthread_mutex_lock(&registry->lock) == EOWNERDEAD)
		pthread_mutex_consistent(&registry->lock);
	ranges = mem_calloc((size_t)registry->count + 1, sizeof(*ranges));
	for (uint32_t i = 0; ranges && i < registry->count; i++) {
		if (registry->ranges[i].used && registry->ranges[i].done)
			ranges[n++] = registry->ranges[i];
	}
	pthread_mutex_unlock(&registry->lock);
	*count_p = n;
	return ranges;
}

bool client_adopted(const void *address, uint64_t bytes, int *fd_p, uint64_t *offset_p)
{
	uint64_t begin = (uintptr_t)address;
	struct adopt_registry *registry;
	const struct adopt_range *range;
	bool found = false;

	if (!address || bytes == 0 || bytes > UINT64_MAX - begin)
		return false;
	/* a process that never adopted needs no registry for this */
	registry = adopt_registry_lock(false);
	if (!registry)
		return false;
	range = adopt_registry_find(registry, begin, begin + bytes);
	if (range && begin >= range->begin &&
	    begin + bytes <= range->begin + range->done) {
		*fd_p = fcntl(range->fd, F_DUPFD_CLOEXEC, 0);
		*offset_p = range->file_begin + (begin - range->begin);
		found = *fd_p >= 0;
	}
	adopt_registry_unlock(registry);
	return found;
}
