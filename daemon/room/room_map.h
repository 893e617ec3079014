/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_map: maps the tokens of a request to pages of views, on one side. Made from a
 * command's "views" or from a peer's message, checked against a layout, immutable
 * afterwards.
 */
#ifndef KVD_ROOM_MAP_H
#define KVD_ROOM_MAP_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/account.h"
#include "daemon/base/cursor.h"
#include "daemon/plan/layout.h"
#include "daemon/plan/plan.h"

#define ROOM_PAGES_MAX (1u << 20) /* of one view of one message */
#define ROOM_SELECT_MAX (1u << 16)
#define ROOM_AUX_VIEW "aux" /* the view that "aux": slot names */

struct room_map {
	char view[LAYOUT_NAME_MAX];
	uint64_t first_token;		 /* in the first slot of pages[0] */
	uint64_t token_begin, token_end; /* half-open; within the pages */
	struct plan_layers layers;
	uint32_t *pages;
	size_t page_count;
	size_t repeat; /* where a page is named a second time; page_count: nowhere; 0: not
			* searched yet */
	/* Of a puller: only tokens token_begin + select[i], ascending. The i-th has place
	 * first_token + i in the pages. NULL: all of them. */
	uint32_t *select;
	size_t select_count;
};

struct room_maps {
	struct room_map *maps;
	size_t count;
	struct charge charge; /* charged for the pages, until room_maps_fini() */
};

/* Parse "views" (may be NULL) and "aux" (-1: none) of a command. Errors name the
 * member: "views.kv.pages[3]: 70 is outside the pool's 64 pages". The memory is
 * charged to `account` (NULL: none); ERR_LIMIT. */
int room_maps_parse(const cJSON *views, int64_t aux, const struct layout *layout,
		    struct account *account, struct room_maps *maps);
/* The same for `count` views in an entry of the submission ring (struct
 * kvd_ring_view), in memory that does not change; not charged yet. Any thread. */
int room_maps_read(const uint8_t *data, size_t len, uint32_t count, int64_t aux,
		   const struct layout *layout, struct room_maps *maps);
/* Cut maps whose views all include the tokens [begin, end) to these tokens, and drop
 * pages without any of them where the view's shard allows that. */
int room_maps_cut(const struct room_maps *maps, const struct layout *layout,
		  uint64_t begin, uint64_t end, struct room_maps *cut);
/* The first map with a selection; NULL: none. */
const struct room_map *room_maps_selection(const struct room_maps *maps);
/* The number of its selected tokens before this one. */
size_t room_map_select_from(const struct room_map *map, uint64_t token);
/* Bytes of a token in its layers of the view. */
uint64_t room_map_token_bytes(const struct room_map *map, const struct layout_view *view);
int room_maps_charge(struct room_maps *maps, struct account *account);
void room_maps_fini(struct room_maps *maps);
/* Start of both parsers. ERR_INVAL, ERR_NOTFOUND, ERR_LIMIT, ERR_RANGE. */
int room_maps_begin(struct room_maps *maps, size_t views);
int room_map_name(struct room_map *map, const char *name, const struct layout *layout,
		  const struct layout_view **view_p);
int room_maps_aux(struct room_maps *maps, int64_t aux, const struct layout *layout);
static inline struct room_maps room_maps_steal(struct room_maps *maps)
{
	struct room_maps stolen = *maps;

	*maps = (struct room_maps){0};
	return stolen;
}

/* The checks of both parsers for each page, and for the rest: ERR_RANGE, ERR_INVAL. */
int room_map_check_page(const struct layout_view *view, const char *where, size_t at,
			uint64_t page);
int room_map_check_ranges(const struct room_map *map, const struct layout_view *view,
			  const char *where);

/* The pages of a map from `at` to `end`, and those that they must be: of another map, for
 * the same tokens. */
struct pages_same {
	const uint32_t *page; /* that `at` must be */
	size_t at, end;
};
/* `outer` includes its tokens, at the same places of their pages? ERR_RANGE. */
int room_map_same_begin(const struct room_map *in, const struct room_maps *outer,
			const struct layout_view *view, struct pages_same *same_p);
/* Compares them, as far as the first `known` pages of the map are known; ERR_RANGE names
 * the first that differs. */
int room_map_same_check(const struct room_map *in, size_t known, struct pages_same *same);

/* ---- on the wire: room_map_wire.c ---- */
/* count u32, {str view, u64 first, u64 begin, u64 end, u32 layer begin, u32
 * layer end, u32 runs, {u32 page, u32 count}…, or with bit 31 of runs {u32 page}…}; with
 * bit 30 of runs, u32 count and {u32 selected token}… before the pages */
size_t room_maps_wire_bytes(const struct room_maps *maps);
void room_maps_put(struct cursor *out, const struct room_maps *maps);

/* The same in parts: for the loop, when there may be many pages. */
struct maps_writer {
	struct cursor *out; /* the caller's; bad when it was too small */
	const struct room_maps *maps;
	size_t map, page;
	size_t runs_at; /* position in `out` of the view's number of runs */
	uint32_t runs;
	uint32_t run_page, run_count; /* the current run */
	bool list;		      /* no runs: each page alone */
};
void maps_writer_begin(struct maps_writer *writer, struct cursor *out,
		       const struct room_maps *maps);
/* Write at most about `most` more pages. False: that was all. */
bool maps_write_some(struct maps_writer *writer, size_t most);
/* Upper limit for any writer, whatever its pages are. */
size_t maps_writer_most(const struct room_maps *maps);

struct maps_reader {
	struct cursor in; /* its bytes stay until the end; see maps_reader_rebase() */
	const struct layout *layout;
	/* its pages must be those of these maps, for the same tokens (NULL: may be any);
	 * set after maps_reader_begin(), they stay until the end */
	const struct room_maps *among;
	bool selects; /* set likewise: selections are allowed */
	struct room_maps maps;
	uint32_t views;	 /* views to come */
	uint64_t budget; /* pages that the remaining views may have */
	/* the current view; NULL: between two */
	const struct layout_view *view;
	const uint8_t *run_bytes;
	uint32_t runs, run, run_done;
	bool list;
	uint64_t total, filled;
	struct pages_same same; /* with `among` */
	bool summed;
};
/* Checked like a command's; runs are summed and checked before memory is allocated.
 * account: as room_maps_parse(); no allocation exceeds its share. */
int maps_reader_begin(struct maps_reader *reader, const struct cursor *in,
		      const struct layout *layout, struct account *account);
/* Read at most about `most` more pages or runs. 0: reader->maps is complete and now
 * the caller's, and reader->in is after it. Outcome 1: more follows. Negative: the
 * parts read are freed. */
int maps_read_some(struct maps_reader *reader, size_t most);
/* The buffer was moved from reader->in.base. */
void maps_reader_rebase(struct maps_reader *reader, const void *base);
/* Given up; idempotent. */
void maps_reader_fini(struct maps_reader *reader);

const struct room_map *room_maps_find(const struct room_maps *maps, const char *view);
/* Are all pages of `inner` those of `outer`, for the same tokens? ERR_RANGE. */
int room_maps_within(const struct room_maps *inner, const struct room_maps *outer,
		     const struct layout *layout);

/* Check that no page of a view is bound twice: each destination needs its own page.
 * ERR_DUP, ERR_NOMEM. */
int room_maps_check_once(const struct room_maps *maps);
/* Tokens of `src`, of the view that has most of them, without a position in `dst`. */
uint64_t room_maps_surplus(const struct room_maps *src, const struct room_maps *dst);

/* Pair the maps of both sides into plan maps: views of both, token ranges cut to those
 * of both (empty ones omitted). Borrows the pages. *maps_p is heap. */
int room_maps_pair(const struct room_maps *src, const struct room_maps *dst,
		   struct plan_map **maps_p, size_t *count_p);

#endif
