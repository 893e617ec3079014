/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A timeline for an engine in C: the progress of one CUDA stream, visible to the daemon
 * without a CUDA call on either host (Python: kvd.Timeline). To be copied.
 *
 * One word in a memfd that the daemon has mapped. The engine's driver registers the page,
 * and its stream writes increasing numbers there (cuStreamWriteValue64). It fences memory
 * first, as __threadfence_system() would (cuda.h, on CU_STREAM_WRITE_VALUE_DEFAULT), so
 * earlier writes of the stream are visible before the number. One word per stream:
 * numbers of two streams would overtake each other. Nothing else is in the memory, which
 * the driver registers and the daemon maps.
 *
 * `stream` is a CUstream (a cudaStream_t is one), whose context is current in the thread
 * of these calls; it must not be capturing a graph. An engine that includes cuda.h needs
 * no dlsym(): the v2 calls of CUDA 12 are used, because the earlier ones were off by
 * default.
 */
#ifndef KVD_EXAMPLES_TIMELINE_H
#define KVD_EXAMPLES_TIMELINE_H

#include <dlfcn.h>
#include <kvd.h>
#include <stdio.h>
#include <string.h>

struct timeline {
	struct kvd_memory memory; /* its first word */
	struct kvd_region *region;
	void *stream;
	uint64_t address; /* of the word, as the GPU sees it */
	uint64_t marks;
	char why[160]; /* the last failure */
	int (*host_register)(void *base, size_t bytes, unsigned int flags);
	int (*host_unregister)(void *base);
	int (*host_address)(uint64_t *address_p, void *host, unsigned int flags);
	int (*stream_write)(void *stream, uint64_t address, uint64_t value,
			    unsigned int flags);
};

static inline int timeline_fails(struct timeline *t, const char *what, int result,
				 const struct kvd_error *error)
{
	snprintf(t->why, sizeof(t->why), "%s: %.100s (%d)", what,
		 error ? error->message : "refused by the driver", result);
	return -1;
}

/* `library` is the driver that the engine has loaded. */
static inline int timeline_driver(struct timeline *t, const char *library)
{
	struct {
		const char *name;
		void *to;
	} wanted[] = {
		{"cuMemHostRegister_v2", &t->host_register},
		{"cuMemHostUnregister", &t->host_unregister},
		{"cuMemHostGetDevicePointer_v2", &t->host_address},
		{"cuStreamWriteValue64_v2", &t->stream_write},
	};
	void *driver = dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);

	for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
		void *symbol = driver ? dlsym(driver, wanted[i].name) : NULL;

		if (!symbol)
			return timeline_fails(t, wanted[i].name, -1, NULL);
		memcpy(wanted[i].to, &symbol, sizeof(symbol));
	}
	return 0;
}

/* Negative: t->why. */
static inline int timeline_open(struct timeline *t, struct kvd_client *client,
				void *stream, const char *library)
{
	int r;

	*t = (struct timeline){.memory = {.fd = -1}, .stream = stream};
	if (timeline_driver(t, library) < 0)
		return -1;
	r = kvd_memory_alloc(sizeof(uint64_t), "kvd-timeline", &t->memory);
	if (r < 0)
		return timeline_fails(t, "memory", r, kvd_last_error(NULL));
	r = kvd_region_memory(client, &t->memory, NULL, &t->region);
	if (r < 0)
		return timeline_fails(t, "region", r, kvd_last_error(client));
	r = t->host_register(t->memory.address, t->memory.bytes,
			     3 /* CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP */);
	if (r)
		return timeline_fails(t, "cuMemHostRegister", r, NULL);
	r = t->host_address(&t->address, t->memory.address, 0);
	return r ? timeline_fails(t, "cuMemHostGetDevicePointer", r, NULL) : 0;
}

/* Append the next number to the stream, and fill in the condition to wait for. Costs one
 * write by the GPU; never blocks. */
static inline int timeline_mark(struct timeline *t, struct kvd_wait *wait_p)
{
	int r = t->stream_write(t->stream, t->address, t->marks + 1, 0);

	if (r)
		return timeline_fails(t, "cuStreamWriteValue64", r, NULL);
	*wait_p = (struct kvd_wait){.region = t->region, .value = ++t->marks};
	return 0;
}

/* Has the stream passed the last mark? */
static inline bool timeline_passed(const struct timeline *t)
{
	return __atomic_load_n((uint64_t *)t->memory.address, __ATOMIC_ACQUIRE) >=
	       t->marks;
}

/* Before kvd_close(), once the stream has passed the last mark. */
static inline int timeline_close(struct timeline *t, struct kvd_client *client)
{
	int r = kvd_region_unregister(t->region, NULL);

	if (r < 0)
		return timeline_fails(t, "region", r, kvd_last_error(client));
	t->host_unregister(t->memory.address);
	kvd_memory_free(&t->memory);
	return 0;
}

#endif
