/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/seal.h"

#include <assert.h>
#include <string.h>

#include <xxhash.h>

#include "daemon/base/cursor.h"

#define MAGIC UINT64_C(0x314b4e4843445631) /* "1VDCHNK1" */
#define VERSION 3u
#define SUM_BYTES 8u /* the header's own, at its end */

void seal_make(uint8_t header[SEAL_HEADER_BYTES], const struct seal_facts *facts,
	       const void *part)
{
	struct cursor out;

	memset(header, 0, SEAL_HEADER_BYTES);
	cursor_write(&out, header, SEAL_HEADER_BYTES);
	cursor_put_u64(&out, MAGIC);
	cursor_put_u32(&out, VERSION);
	cursor_put_u32(&out, facts->tokens);
	cursor_put_bytes(&out, facts->class_digest, SEAL_DIGEST_BYTES);
	cursor_put_bytes(&out, facts->id, SEAL_ID_BYTES);
	cursor_put_u64(&out, facts->first);
	cursor_put_u64(&out, facts->generation);
	cursor_put_u64(&out, facts->part_bytes);
	cursor_put_u64(&out, XXH3_64bits(part, facts->part_bytes));
	out.pos = SEAL_HEADER_BYTES - SUM_BYTES;
	cursor_put_u64(&out, XXH3_64bits(header, SEAL_HEADER_BYTES - SUM_BYTES));
	assert(!out.bad);
}

/* Common to all formats: magic, version, and the sum at the end. */
static bool head_read(const uint8_t header[SEAL_HEADER_BYTES], struct cursor *in,
		      uint32_t *version_p)
{
	struct cursor end;

	cursor_read(in, header, SEAL_HEADER_BYTES);
	end = *in;
	end.pos = SEAL_HEADER_BYTES - SUM_BYTES;
	if (cursor_get_u64(in) != MAGIC)
		return false;
	*version_p = cursor_get_u32(in);
	return cursor_get_u64(&end) == XXH3_64bits(header, SEAL_HEADER_BYTES - SUM_BYTES);
}

bool seal_is_other(const uint8_t header[SEAL_HEADER_BYTES], uint32_t *version_p)
{
	struct cursor in;

	return head_read(header, &in, version_p) && *version_p != VERSION;
}

bool seal_read(const uint8_t header[SEAL_HEADER_BYTES], struct seal_facts *facts_p)
{
	struct seal_facts facts;
	uint32_t version;
	struct cursor in;

	if (!head_read(header, &in, &version) || version != VERSION)
		return false;
	facts.tokens = cursor_get_u32(&in);
	memcpy(facts.class_digest, cursor_get_bytes(&in, SEAL_DIGEST_BYTES),
	       SEAL_DIGEST_BYTES);
	memcpy(facts.id, cursor_get_bytes(&in, SEAL_ID_BYTES), SEAL_ID_BYTES);
	facts.first = cursor_get_u64(&in);
	facts.generation = cursor_get_u64(&in);
	facts.part_bytes = cursor_get_u64(&in);
	facts.part_sum = cursor_get_u64(&in);
	if (in.bad || facts.part_bytes == 0 || facts.part_bytes > UINT64_C(1) << 40)
		return false;
	*facts_p = facts;
	return true;
}

bool seal_is_whole(const struct seal_facts *facts, const void *part)
{
	return XXH3_64bits(part, facts->part_bytes) == facts->part_sum;
}
