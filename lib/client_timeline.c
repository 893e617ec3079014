/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Timelines: the progress of one CUDA stream of the engine, visible to the daemon without
 * a CUDA call on either host.
 *
 * One word in a memfd that the daemon has mapped. The engine's driver registers the page,
 * and its stream writes increasing numbers there (cuStreamWriteValue64). It fences memory
 * first, as __threadfence_system() would (cuda.h, on CU_STREAM_WRITE_VALUE_DEFAULT), so
 * earlier writes of the stream are visible before the number. The daemon loads the word
 * with acquire order. One word per stream: numbers of two streams would overtake each
 * other. One page per word: the driver registers whole pages, and the daemon should map
 * nothing else of the engine.
 *
 * The driver is the one that the engine has loaded; no CUDA library is linked. Only the
 * v2 calls are used (CUDA 12), because the earlier ones were off by default.
 */
#include "lib/client.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LIBRARY "libcuda.so.1"
#define PORTABLE_MAPPED 3u /* CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP */

/* those of cuda.h, by their versioned names */
struct driver {
	int (*host_register)(void *base, size_t bytes, unsigned int flags);
	int (*host_unregister)(void *base);
	int (*host_address)(uint64_t *address_p, void *host, unsigned int flags);
	int (*stream_write)(void *stream, uint64_t address, uint64_t value,
			    unsigned int flags);
	int (*error_name)(int result, const char **name_p);
};

struct kvd_timeline {
	struct kvd_client *client;
	struct kvd_region *region;
	struct driver driver;
	void *stream;
	int fd;
	uint64_t *word; /* mapped */
	size_t bytes;
	bool registered;  /* registered with the driver */
	uint64_t address; /* of the word, as the GPU sees it */
	uint64_t marks;
};

static int cuda_failed(struct kvd_timeline *t, int result, const char *what)
{
	const char *name = NULL;

	if (t->driver.error_name(result, &name) || !name)
		name = "unknown to this driver";
	return client_fail(t->client, KVD_E_IO,
			   "%s: %s (%d); the stream's context must be current in this "
			   "thread",
			   what, name, result);
}

static int driver_load(struct kvd_timeline *t, const char *path)
{
	struct {
		const char *name;
		void *to;
	} wanted[] = {
		{"cuMemHostRegister_v2", &t->driver.host_register},
		{"cuMemHostUnregister", &t->driver.host_unregister},
		{"cuMemHostGetDevicePointer_v2", &t->driver.host_address},
		{"cuStreamWriteValue64_v2", &t->driver.stream_write},
		{"cuGetErrorName", &t->driver.error_name},
	};
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);

	if (!library)
		return client_fail(t->client, KVD_E_REQUIRE, "no CUDA driver: %s",
				   dlerror());
	for (size_t i = 0; i < ARRAY_LEN(wanted); i++) {
		void *symbol = dlsym(library, wanted[i].name);

		if (!symbol) {
			dlclose(library);
			return client_fail(t->client, KVD_E_REQUIRE,
					   "%s has no %s; CUDA 12 or later is required",
					   path, wanted[i].name);
		}
		memcpy(wanted[i].to, &symbol, sizeof(symbol));
	}
	dlclose(library); /* it stays: RTLD_NODELETE */
	return 0;
}

static int word_map(struct kvd_timeline *t)
{
	void *map;

	t->bytes = (size_t)sysconf(_SC_PAGESIZE);
	t->fd = memfd_create("kvd-timeline", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	if (t->fd < 0 || ftruncate(t->fd, (off_t)t->bytes) < 0 ||
	    fcntl(t->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
		return client_fail(t->client, KVD_E_IO, "a memfd for the timeline: %m");
	map = mmap(NULL, t->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
		   t->fd, 0);
	if (map == MAP_FAILED)
		return client_fail(t->client, KVD_E_NOMEM, "mapping the timeline: %m");
	t->word = map;
	return 0;
}

static int word_register(struct kvd_timeline *t)
{
	int result = t->driver.host_register(t->word, t->bytes, PORTABLE_MAPPED);

	if (result)
		return cuda_failed(t, result, "cuMemHostRegister");
	t->registered = true;
	result = t->driver.host_address(&t->address, t->word, 0);
	if (result)
		return cuda_failed(t, result, "cuMemHostGetDevicePointer");
	return 0;
}

static int region_make(struct kvd_timeline *t, int timeout_ms)
{
	const struct kvd_region_args args = {.kind = KVD_REGION_MEMFD,
					     .fd = t->fd,
					     .bytes = t->bytes,
					     .name = "timeline"};
	const struct kvd_call call = {.timeout_ms = timeout_ms};

	return kvd_region_register(t->client, &args, &call, &t->region);
}

/* The daemon has dropped its part already, or drops it with the session. */
static void timeline_free(struct kvd_timeline *t)
{
	if (t->registered)
		(void)t->driver.host_unregister(t->word);
	if (t->word)
		(void)munmap(t->word, t->bytes);
	mem_closep(&t->fd);
	mem_free(t);
}

int kvd_timeline_open(struct kvd_client *client, void *stream, const char *library,
		      int timeout_ms, struct kvd_timeline **timeline_p)
{
	struct kvd_timeline *t = mem_zalloc(sizeof(*t));
	int r;

	*timeline_p = NULL;
	if (!t)
		return client_fail_nomem(client);
	t->client = client;
	t->stream = stream;
	t->fd = -1;
	r = driver_load(t, library ? library : LIBRARY);
	if (!r)
		r = word_map(t);
	if (!r)
		r = word_register(t);
	if (!r)
		r = region_make(t, timeout_ms);
	if (r) {
		timeline_free(t);
		return r;
	}
	*timeline_p = t;
	return 0;
}

int kvd_timeline_mark(struct kvd_timeline *t, struct kvd_wait *wait_p)
{
	int result = t->driver.stream_write(t->stream, t->address, t->marks + 1, 0);

	*wait_p = (struct kvd_wait){0};
	if (result)
		return cuda_failed(t, result, "cuStreamWriteValue64");
	wait_p->region = t->region;
	wait_p->value = ++t->marks;
	return 0;
}

bool kvd_timeline_passed(const struct kvd_timeline *t)
{
	return __atomic_load_n(t->word, __ATOMIC_ACQUIRE) >= t->marks;
}

int kvd_timeline_close(struct kvd_timeline *t, int timeout_ms)
{
	const struct kvd_call call = {.timeout_ms = timeout_ms};
	int r;

	if (!kvd_timeline_passed(t))
		return client_fail(t->client, KVD_E_BUSY,
				   "the stream has not passed the timeline's last mark");
	r = kvd_region_unregister(t->region, &call);
	if (r)
		return r;
	timeline_free(t);
	return 0;
}
