/* SPDX-License-Identifier: Apache-2.0 */
/* layout_private: shared by the planner's files that handle layouts. */
#ifndef KVD_PLAN_LAYOUT_PRIVATE_H
#define KVD_PLAN_LAYOUT_PRIVATE_H

#include <stdio.h>

#include "daemon/plan/layout.h"

#define LAYOUT_PATH_MAX 96u /* holds "views.<31 bytes>.layers[n].fields[n]" */

static inline void layout_view_path(char *path, const char *view)
{
	snprintf(path, LAYOUT_PATH_MAX, "views.%.31s", view);
}

static inline void layout_path(char *path, const struct layout_view *view,
			       uint32_t layer_index, uint32_t field_index)
{
	snprintf(path, LAYOUT_PATH_MAX, "views.%.31s.layers[%u].fields[%u]", view->name,
		 layer_index, field_index);
}

/* 1 to 31 bytes of printable ASCII; ERR_INVAL names `path`. */
int layout_name_check(const char *name, const char *path);
/* The same of a format, which may also be empty. */
int layout_format_check(const char *format, const char *path);
/* Check one field against its layer's earlier ones, its units and its buffer. */
int layout_field_check(const struct layout *layout, const struct layout_view *view,
		       const struct layout_layer *layer, uint32_t index,
		       const char *path);
/* Check a complete view whose name and counts are within the limits. */
int layout_view_check(const struct layout *layout, const struct layout_view *view);
/* The layers that two views both hold, in ascending order: zero but for the views. */
struct layout_layers {
	const struct layout_view *one, *other;
	const struct layout_layer *a, *b; /* of each, after a true */
	uint32_t i, j;
};
bool layout_layers_next(struct layout_layers *at);
/* ERR_LAYOUT with the first difference of a layer that both hold. */
int layout_layer_compatible(const char *view, const struct layout_layer *one,
			    const struct layout_layer *other,
			    const struct layout_sides *sides);

#endif
