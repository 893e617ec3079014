/* SPDX-License-Identifier: Apache-2.0 */
/* page: page.html, embedded in the program. */
#ifndef KVD_METRICS_PAGE_H
#define KVD_METRICS_PAGE_H

struct text;

/* The page's only script and style carry a random nonce, so any other script in the
 * page is not run. `nonce`: the value that its header must name. */
#define PAGE_NONCE_CHARS 32u
void page_make(struct text *out, char nonce[PAGE_NONCE_CHARS + 1]);

#endif
