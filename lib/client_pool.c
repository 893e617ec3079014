/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/client.h"

#include <stdio.h>
#include <string.h>

/* Keeps all of its arguments, for kvd_reconnect(). The daemon does not release a
 * region while a pool uses it, so the regions' handles outlive the pool's. */
struct kvd_pool {
	struct client_object object;
	char name[64];
	char *layout;
	size_t region_count;
	struct pool_part {
		struct kvd_region *region;
		uint64_t offset;
	} * parts;
};

static void pool_fini(struct client_object *object)
{
	struct kvd_pool *pool = container_of(object, struct kvd_pool, object);

	mem_free(pool->layout);
	mem_free(pool->parts);
	mem_free(pool);
}

static int pool_op(struct kvd_pool *pool, struct client_op *op)
{
	struct kvd_client *client = pool->object.client;

	client_op_begin(client, op, "pool.register");
	out_text(&op->text, "name", pool->name);
	out_json(&op->text, "layout", pool->layout);
	out_array(&op->text, "regions");
	for (size_t i = 0; i < pool->region_count; i++) {
		uint64_t id = kvd_region_id(pool->parts[i].region);

		if (!id) {
			text_fini(&op->text);
			return client_fail(client, KVD_E_STATE,
					   "regions[%zu]: not registered", i);
		}
		out_object(&op->text, NULL);
		out_number(&op->text, "region", id);
		out_some(&op->text, "offset", pool->parts[i].offset);
		out_close(&op->text, '}');
	}
	out_close(&op->text, ']');
	op->object = &pool->object;
	return 0;
}

int client_layout_check(struct kvd_client *client, const char *text)
{
	cJSON *json = text ? cJSON_Parse(text) : NULL;
	bool ok = cJSON_IsObject(json);

	cJSON_Delete(json);
	return ok ? 0 : client_fail(client, KVD_E_INVAL, "layout: must be a JSON object");
}

static int client_pool_new(struct kvd_client *client, const struct kvd_pool_args *a,
			   struct kvd_pool **pool_p)
{
	struct kvd_pool *pool = mem_zalloc(sizeof(*pool));

	if (!pool)
		return client_fail_nomem(client);
	client_object_init(client, &pool->object, CLIENT_POOL, pool_fini);
	pool->layout = mem_strdup(a->layout);
	pool->parts = mem_calloc(a->region_count, sizeof(*pool->parts));
	if (!pool->layout || !pool->parts) {
		client_object_unref(&pool->object);
		return client_fail_nomem(client);
	}
	cJSON_Minify(pool->layout); /* a newline would end the line */
	snprintf(pool->name, sizeof(pool->name), "%s", a->name ? a->name : "kv");
	pool->region_count = a->region_count;
	for (size_t i = 0; i < a->region_count; i++)
		pool->parts[i] =
			(struct pool_part){a->regions[i], a->offsets ? a->offsets[i] : 0};
	*pool_p = pool;
	return 0;
}

int kvd_pool_register(struct kvd_client *client, const struct kvd_pool_args *args,
		      const struct kvd_call *call, struct kvd_pool **pool_p)
{
	struct kvd_pool *pool = NULL;
	struct client_op op;
	int r = client_begin(client, call);

	*pool_p = NULL;
	if (!r)
		r = client_layout_check(client, args->layout);
	if (!r)
		r = client_pool_new(client, args, &pool);
	if (r)
		return r;
	*pool_p = pool;
	r = pool_op(pool, &op);
	op.finish = client_object_made;
	if (!r)
		r = client_op_run(client, &op, call);
	if (r) {
		*pool_p = NULL;
		client_object_unref(&pool->object);
	}
	return r;
}

int kvd_pool_unregister(struct kvd_pool *pool, const struct kvd_call *call)
{
	return client_object_close(&pool->object, call);
}

int client_pool_again(struct kvd_pool *pool)
{
	struct client_op op;
	int r = pool_op(pool, &op);

	return r ? r : client_session_again(&op);
}

const char *client_pool_layout(const struct kvd_pool *pool)
{
	return pool->layout;
}

int client_pool_address(const struct kvd_pool *pool, uint32_t buffer, uint64_t *address_p,
			bool *gpu_p)
{
	const struct pool_part *part = &pool->parts[buffer];
	int r = client_region_address(part->region, address_p, gpu_p);

	*address_p += part->offset;
	return r ? client_fail(pool->object.client, KVD_E_REQUIRE,
			       "pool: region of buffer %u: %s", buffer,
			       r < 0 ? "no memory of this process"
				     : "registered without its address in this process")
		 : 0;
}

uint64_t kvd_pool_id(const struct kvd_pool *pool)
{
	return client_object_id(&pool->object);
}
