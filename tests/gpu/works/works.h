/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu-works: what kvd does with GPU memory, seen from engines, on whatever driver
 * there is: the machine's, or the one that KVD_CUDA_LIB names (the tests' fake). It
 * needs nothing but kvd beside it, so that it runs where nothing is installed.
 *
 *   gpu-works test [WORDS]    each case in a process of its own, a line each
 *   gpu-works sweep [WORDS]   every call of the tests' driver fails once
 *   gpu-works bench [WORDS]   figures, as shares of what the driver does by itself
 *   gpu-works list
 *
 * One process plays both engines; daemons, and engines that die, are others.
 * KVD_GPU_SHRINK=n divides the benches' sizes. KVD_GPU_DEVICE=n is not the first.
 */
#ifndef TESTS_GPU_WORKS_H
#define TESTS_GPU_WORKS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdnoreturn.h>
#include <sys/types.h>

#include "gpu/cudrv.h"
#include "lib/kvd.h"
#include "tests/gpu/engine_calls.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define WAIT_MS 60000

/* ---- ends of a case ---- */

noreturn void die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
noreturn void skip(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void well(const struct kvd_client *client, int r, const char *what);
void *need(void *p); /* no memory ends the case */

/* ---- cuda.c: the engine's side of the driver ---- */

struct cuda {
	struct cudrv drv;
	int (*mem_alloc)(uint64_t *address_p, size_t bytes);
	int (*mem_free)(uint64_t address);
	ENGINE_CALLS(CUDRV_FIELD)
	bool fake; /* a driver of tests */
	int device;
	char uuid[CUDRV_UUID_TEXT];
	char name[64];
	struct cu_stream *stream; /* the engine's */
};

extern struct cuda cuda;
/* Context of the device current, a stream made. No driver: skip(). */
void cuda_start(void);
const char *cuda_library(void);
void cu(int result, const char *what); /* a result that must be good */
uint64_t cuda_alloc(uint64_t bytes);
void cuda_sync(void);
/* A stream's job that lasts until hold_end(). */
struct hold;
struct hold *hold_begin(struct cu_stream *stream);
void hold_end(struct hold *hold);

/* ---- rig.c: daemons and other processes ---- */

#define RIG_DAEMONS 2u
struct rig {
	char dir[64];
	pid_t pids[RIG_DAEMONS];
	const char *more; /* lines of [transport] */
	bool quiet; /* faults are provoked: what the daemons say of them is not shown */
};

/* Its folder, before it is started, or by starting it. `rig` is zero. */
void rig_folder(struct rig *rig);
/* `count` daemons with these transports ("auto"…). */
void rig_start(struct rig *rig, unsigned int count, const char *transports);
void rig_socket(const struct rig *rig, unsigned int index, char socket[128]);
void rig_logs(const struct rig *rig); /* shown */
void rig_stop(struct rig *rig);	      /* they must end well, nothing of them left */
/* This program again, as `role` with two words; its stdin and stdout. */
struct helper {
	pid_t pid;
	int to, from;
};
void helper_start(struct helper *helper, const char *role, const char *word,
		  const char *more);
void helper_hear(struct helper *helper, void *data, size_t bytes);
void helper_tell(struct helper *helper, char what); /* and wait for it to say so */
void helper_kill(struct helper *helper);
/* What it was started as. */
struct role {
	const char *name;
	int (*run)(const char *word, const char *more);
};
extern const struct role roles[];

/* ---- engine.c: an engine, its cache, its transfers ---- */

enum where { AT_GPU, AT_GPU_VMM, AT_HOST };

struct engine {
	struct kvd_client *client;
	enum where where;
	uint64_t base, bytes; /* as this process sees it */
	int fd;
	struct kvd_memory memory;
	struct kvd_region *region;
	struct kvd_pool *pool; /* pages of page_bytes, if that is not 0 */
	uint64_t page_bytes;
	uint32_t pages;
};

void engine_memory(struct engine *e, enum where where, uint64_t bytes);
void engine_connect(struct engine *e, const struct rig *rig, unsigned int daemon);
int engine_register(struct engine *e); /* the code of a refusal */
/* All three: memory, client, region. */
void engine_open(struct engine *e, const struct rig *rig, unsigned int daemon,
		 enum where where, uint64_t bytes);
void engine_pool(struct engine *e, uint64_t page_bytes);
void engine_close(struct engine *e);
void engine_put(struct engine *e, uint64_t offset, const void *data, uint64_t bytes);
void engine_get(struct engine *e, uint64_t offset, void *data, uint64_t bytes);
void engine_fill(struct engine *e, uint8_t byte);
/* Bytes that tell where they are from. */
void engine_pattern(struct engine *e, uint64_t salt);
uint64_t engine_attach(const struct engine *own, const struct engine *remote);
void region_ipc(struct kvd_client *client, uint64_t allocation, uint64_t offset,
		uint64_t bytes, struct kvd_region **region_p);

/* at the same bytes of nothing: shuffled on both sides */
struct rows {
	uint64_t bytes, count;
	uint64_t *src, *dst; /* offsets */
};
void rows_make(struct rows *rows, uint64_t bytes, uint64_t count, uint64_t within);
void rows_free(struct rows *rows);
/* A transfer from `src` to `dst`, of which `by` (one of them) asks. */
int rows_xfer_try(const struct rows *rows, const struct engine *src,
		  const struct engine *dst, bool dst_asks, struct kvd_xfer **xfer_p);
struct kvd_xfer *rows_xfer(const struct rows *rows, const struct engine *src,
			   const struct engine *dst, bool dst_asks);
void rows_check(const struct rows *rows, struct engine *src, struct engine *dst);
/* Seconds from kvd_xfer_post() to success. */
double xfer_run(struct kvd_xfer *xfer);

extern unsigned int room_waiting_ms; /* of rooms opened from now on; 0: the default */
struct kvd_room *room_recv(struct engine *dst, const struct engine *src, uint64_t number,
			   uint32_t page, const struct kvd_wait *wait);
struct kvd_room *room_send(struct engine *src, uint64_t number, uint32_t page,
			   const struct kvd_wait *wait);
/* Until it is terminal; its state. */
int room_end(struct kvd_room *room);
void room_done(struct kvd_room *send, struct kvd_room *recv); /* both succeed; closed */
void room_failed(struct kvd_room *room, int code, const char *words);

/* ---- what there is ---- */

struct work {
	const char *name, *what;
	void (*run)(void);
};
extern const struct work tests[], benches[];
unsigned int shrink(void);
extern const struct work sweeps[]; /* on the tests' driver alone */
void chunks_test(void);
void splice_test(void);
void gather_test(void);
void chunks_bench(void);
void attend_test(void);
void attend_bench(void);
void attend_daemon_test(void);
void attend_daemon_bench(void);
void streams_bench(void);
void busy_attend_bench(void);
void attend_kill_test(void);
void attend_stream_test(void);
/* Best seconds of one copy between the device and pinned memory. */
double plain_pinned(uint64_t bytes, bool to_device);
/* Roles of test.c, attend_daemon.c and bench.c. */
int victim_main(const char *socket, const char *bytes);
int publisher_main(const char *dir, const char *chunks);
int exporter_main(const char *word, const char *more);
int busy_main(const char *seconds, const char *more);
/* Kernels a second of the role "busy", since the last time. */
double busy_rate(struct helper *helper, double since);
void busy_while(double seconds);

#endif
