/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_kvd: the daemon's end of a control socket, in a process of its own, so
 * that libkvd's tests decide what is answered, when, and when the daemon dies.
 *
 * Each line that comes in is logged and answered with the oldest scripted
 * answer, or with {"id":…,"ok":true} when there is none. In an answer %ID% is
 * the line's id, %PREV% the id of the line before it; several lines may stand in
 * one answer, and "" is silence. `hello` is answered with the status page unless
 * fake_kvd_hello() scripted something else. The page is the test's to write.
 */
#ifndef KVD_TESTS_FAKE_KVD_H
#define KVD_TESTS_FAKE_KVD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/kvd_ring.h"
#include "proto/kvd_status.h"

#define FAKE_KVD_SLOTS 64u
#define FAKE_KVD_ENTRIES 16u
#define FAKE_KVD_ARENA_BYTES 4096u

struct fake_kvd;

void fake_kvd_start(struct fake_kvd **fake_p);
/* Ends the process if it still runs. */
void fake_kvd_free(struct fake_kvd *fake);
const char *fake_kvd_path(const struct fake_kvd *fake);
pid_t fake_kvd_pid(const struct fake_kvd *fake);
/* SIGKILL, and wait until the kernel says that it is gone. */
void fake_kvd_kill(struct fake_kvd *fake);
/* A new process on the same path, after fake_kvd_kill(); a new page, too. */
void fake_kvd_restart(struct fake_kvd *fake);

/* Script an answer. Actions instead of JSON: "!close" ends the connection,
 * "!fds" answers ok with four fds nobody asked for, "!ring" shares the ring; what
 * follows that word is in its answer, too. */
void fake_kvd_answer(struct fake_kvd *fake, const char *answer);
/* Forget the answers that were not used. */
void fake_kvd_drop_answers(struct fake_kvd *fake);
/* What the next hello is answered with (JSON, without the page). */
void fake_kvd_hello(struct fake_kvd *fake, const char *answer);

/* Its clock is so much ahead of this process's from the next hello on. */
void fake_kvd_shift(struct fake_kvd *fake, int64_t ns);

/* The n-th line that came in, from 0, hello included; waits for it (10 s, then
 * the test fails). fd_count: how many fds came with it. */
const char *fake_kvd_line(struct fake_kvd *fake, unsigned int n,
			  unsigned int *fd_count_p);
unsigned int fake_kvd_lines(const struct fake_kvd *fake);

struct kvd_status_header *fake_kvd_page(struct fake_kvd *fake);
struct kvd_status_slot *fake_kvd_slot(struct fake_kvd *fake, unsigned int slot);
/* Store a slot's word, as the daemon does. */
void fake_kvd_word(struct fake_kvd *fake, unsigned int slot, uint32_t gen,
		   unsigned int state, unsigned int flags, unsigned int error);
/* false: the heartbeat stopped long ago. */
void fake_kvd_heartbeat(struct fake_kvd *fake, bool fresh);

/* The submission ring of an answer "!ring", and its arena. Nobody takes its entries:
 * the test moves the head. */
struct kvd_ring_header *fake_kvd_ring(struct fake_kvd *fake);
const uint8_t *fake_kvd_arena(struct fake_kvd *fake);

#endif
