/* SPDX-License-Identifier: Apache-2.0 */
/*
 * calibrate: measures the path to a peer by echoes, and requests its attention speed;
 * also the local speed, and that of merging. The results are written to the cost page
 * (daemon/cost/live.h). One peer at a time: concurrent echoes would measure each other.
 */
#ifndef KVD_ATTEND_CALIBRATE_H
#define KVD_ATTEND_CALIBRATE_H

#include <stdbool.h>
#include <stdint.h>

struct attends;
struct err;
struct form;
struct loop_defer;
struct loop_timer;
struct remote;
struct wire_attention_result;

#define CALIBRATE_SIZES 4u
#define CALIBRATE_FORMS_MAX 8u /* geometries: as many as a peer reports at once */
#define CALIBRATE_ROUNDS_MAX 400u
#define CALIBRATE_ROWS_MAX 2048u /* all of them in flight at once */

#define CALIBRATE_ROW_BYTES 1152u /* a query row of MLA 576 in bf16 */

struct calibrate_result {
	struct {
		uint64_t bytes; /* there and back */
		double us, mad_us;
		uint32_t count;
	} sizes[CALIBRATE_SIZES];
	uint32_t size_count;
	uint64_t bytes; /* of all echoes */
};

struct calibrate_args {
	struct remote *remote; /* held meanwhile; its line is ready */
	/* Rows of CALIBRATE_ROW_BYTES an echo: 0, the usual sizes; else this one alone,
	 * `rounds` times, without a change to the page. */
	uint32_t rows, rounds;
	bool speeds; /* of recent geometries, if unknown; no echoes */
	void *owner;
	/* Once, in a later turn; or NULL. */
	void (*on_done)(void *owner, const struct calibrate_result *result,
			const struct err *why);
};

/* ERR_PEER: down; ERR_REQUIRE: it does not compute attention; ERR_BUSY: in progress. */
int calibrate_begin(struct attends *attends, const struct calibrate_args *args);
/* The same when it is due: a peer whose constants are requested and unknown, or no longer
 * predict well; at most once a minute, and later where it is not due yet. */
void calibrate_soon(struct attends *attends, struct remote *remote);
/* The page has a reader from now on: it is filled, and kept up to date. */
void calibrate_all(struct attends *attends);
/* A reply to an echo: number from CALIBRATE_FIRST on. */
#define CALIBRATE_FIRST (UINT64_C(1) << 63)
int calibrate_on_result(struct attends *attends, struct remote *remote,
			const struct wire_attention_result *msg);
/* An attention context was opened: measure its speed, here and at all peers. */
void calibrate_on_open(struct attends *attends, const struct form *form);
void calibrate_on_due(struct loop_timer *timer); /* attends->calibrate_due */
void calibrate_on_change(struct attends *attends, struct remote *remote);
void calibrate_on_down(struct attends *attends, const struct remote *remote,
		       const struct err *why);
void calibrate_on_next(struct loop_defer *defer); /* attends->calibrate_next */
void calibrate_close(struct attends *attends, const struct err *why);

#endif
