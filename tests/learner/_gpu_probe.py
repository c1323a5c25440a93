import time, torch, transformers
print(torch.__version__, transformers.__version__)
from transformers import Qwen2Config, Qwen2ForCausalLM
from drivetrain_learner import *
from drivetrain_sharding import digest, named_tensors
cfg=Qwen2Config(vocab_size=151936,hidden_size=1536,intermediate_size=8960,num_hidden_layers=28,num_attention_heads=12,num_key_value_heads=2,tie_word_embeddings=True,max_position_embeddings=32768)
with torch.device("cuda"): m=Qwen2ForCausalLM(cfg)
m=m.float().train(); 
g=torch.Generator().manual_seed(0)
logn=(torch.randn(60,generator=g)*0.8+5.5).exp().long().clamp(20,1025).tolist()
for ck,lens in ((True,[1025]*16),(False,[1025]*16),(False,logn)):
    if ck: m.gradient_checkpointing_enable()
    else: m.gradient_checkpointing_disable()
    pol=PolicyModel(m,autocast=torch.bfloat16)
    b=PackedBatch.pack([torch.randint(0,150000,(n,)).tolist() for n in lens],[[i>n//4 for i in range(n)] for n in lens])
    L=Learner(pol,LearnerConfig(lr=1e-6,max_tokens_per_microbatch=16384))
    n=float(b.loss_mask.sum())
    torch.cuda.reset_peak_memory_stats()
    for i in range(4):
        torch.cuda.synchronize(); t=time.time()
        r=L.update(b,lambda x: LossTerms(loss=-pol(x).logprobs.sum()/n)); torch.cuda.synchronize(); dt=time.time()-t
        if i>1: print('ck',ck,b.num_tokens,r.loss,r.grad_norm,round(dt,3),'s',round(b.num_tokens/dt),'tok/s',round(torch.cuda.max_memory_allocated()/2**30,1),'GiB',flush=True)
    o=L.infer(b,lambda x: pol(x).logprobs); torch.cuda.synchronize(); t=time.time(); o=L.infer(b,lambda x: pol(x).logprobs); torch.cuda.synchronize(); print('infer',round(b.num_tokens/(time.time()-t)))
    L.optimizer.state.clear(); del L
w=[(n,t.bfloat16()) for n,t in named_tensors(m)]
for i in range(3):
    torch.cuda.synchronize(); t=time.time(); h=digest(w); print('digest',h[:8],round((time.time()-t)*1e3,1),'ms',sum(t.nbytes for _,t in w)/1e9,'GB')
x=w[:5]; assert digest(x)==digest([(n,t.cpu()) for n,t in x])
