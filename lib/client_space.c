/* SPDX-License-Identifier: Apache-2.0 */
/* Spaces of chunks: the properties that must be equal for chunks of two engines to be
 * interchangeable. */
#include "lib/client.h"

#include <string.h>

static void space_fini(struct client_object *object)
{
	mem_free(container_of(object, struct kvd_space, object));
}

static int space_text(struct text *text, const struct kvd_space_args *a)
{
	if (a->pool) {
		out_number(text, "pool", kvd_pool_id(a->pool));
	} else {
		cleanup_free char *layout = mem_strdup(a->layout);

		if (!layout)
			return -1;
		cJSON_Minify(layout); /* a newline would end the line */
		out_json(text, "layout", layout);
	}
	out_text(text, "model", a->model);
	out_text(text, "scheme", a->scheme);
	out_text(text, "revision", a->revision);
	out_text(text, "rope", a->rope);
	out_number(text, "tokens", a->tokens);
	if (a->views)
		client_text_names(text, "views", a->views, a->view_count);
	return 0;
}

static int space_check(struct kvd_client *client, const struct kvd_space_args *a)
{
	if (!a->pool == !a->layout)
		return client_fail(client, KVD_E_INVAL,
				   "pool, layout: give exactly one of them");
	if (!a->model || !a->scheme)
		return client_fail(client, KVD_E_INVAL, "%s: missing",
				   a->model ? "scheme" : "model");
	if (a->pool)
		return kvd_pool_id(a->pool)
			       ? 0
			       : client_fail(client, KVD_E_STATE, "pool: not registered");
	return client_layout_check(client, a->layout);
}

int kvd_space_open(struct kvd_client *client, const struct kvd_space_args *args,
		   const struct kvd_call *call, struct kvd_space **space_p)
{
	struct kvd_space *space;
	struct client_op op;
	int r = client_begin(client, call);

	*space_p = NULL;
	if (!r)
		r = space_check(client, args);
	if (r)
		return r;
	space = mem_zalloc(sizeof(*space));
	if (!space)
		return client_fail_nomem(client);
	client_object_init(client, &space->object, CLIENT_SPACE, space_fini);
	client_op_begin(client, &op, "space.open");
	if (space_text(&op.text, args) < 0) {
		text_fini(&op.text);
		client_object_unref(&space->object);
		return client_fail_nomem(client);
	}
	op.object = &space->object;
	op.finish = client_object_made;
	*space_p = space;
	r = client_op_run(client, &op, call);
	if (r) {
		*space_p = NULL;
		client_object_unref(&space->object);
	}
	return r;
}

int kvd_space_close(struct kvd_space *space, const struct kvd_call *call)
{
	return client_object_close(&space->object, call);
}
