/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nest: boxes of rows, merged to the fewest rows and proven disjoint, without expanding
 * the rows.
 *
 * A box is a loop nest of up to three dimensions (pages, tokens, units) around one row.
 * nest_solve() takes any boxes and returns boxes whose rows reach every destination byte
 * at most once, and in which no two rows are neighbours on both sides.
 */
#ifndef KVD_PLAN_NEST_H
#define KVD_PLAN_NEST_H

#include <stddef.h>
#include <stdint.h>

#define NEST_DIMS 3

struct nest_dim {
	uint64_t count;	   /* at least 2 */
	uint64_t src, dst; /* strides */
};

struct nest_box {
	uint64_t src, dst, len;
	uint32_t src_buffer, dst_buffer;
	uint32_t tag; /* set by the caller; returned with NEST_TWICE */
	uint32_t dims;
	struct nest_dim dim[NEST_DIMS]; /* descending by destination stride */
};

enum nest_shape {
	NEST_CLEAN,	/* rows ascend, disjoint and not adjacent */
	NEST_IRREGULAR, /* rows interleave, touch or overlap: for nest_solve() */
};

/* Add a dimension, innermost first or last according to its stride; a count of 1 is
 * omitted. At most NEST_DIMS times. */
void nest_box_add(struct nest_box *box, uint64_t count, uint64_t src, uint64_t dst);
/* Absorb dimensions whose rows are adjacent on both sides; the `depth` outer ones
 * stay. */
void nest_box_collapse(struct nest_box *box, uint32_t depth);
/* Merge two loops into one where the outer one continues at the end of the inner one:
 * fewer and longer runs. For finished boxes. */
void nest_box_unroll(struct nest_box *box);
enum nest_shape nest_box_shape(const struct nest_box *box, uint32_t depth); /* the same */
/* The end of the destination bytes, and of the last row's source. */
uint64_t nest_box_dst_end(const struct nest_box *box);
uint64_t nest_box_src_end(const struct nest_box *box);

#define NEST_BOXES_MAX (1u << 21)

struct nest_boxes {
	struct nest_box *items;
	size_t count, cap;
	size_t limit; /* 0 is NEST_BOXES_MAX */
};
void nest_boxes_fini(struct nest_boxes *boxes);
int nest_boxes_add(struct nest_boxes *boxes, const struct nest_box *box);

/* Positive outcome: two rows reach one destination byte. */
#define NEST_TWICE 1
struct nest_clash {
	uint32_t tag[2];
	uint32_t dst_buffer;
	uint64_t dst, len; /* bytes reached twice */
};

/*
 * `in` is consumed (sorted, in place). 0, NEST_TWICE with *clash_p filled, or ERR_LIMIT
 * when the boxes are so irregular that they cannot be separated with in->limit pieces.
 */
int nest_solve(struct nest_boxes *in, struct nest_boxes *out, struct nest_clash *clash_p);

#endif
